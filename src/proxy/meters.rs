//! The proxy's counters, looked up once: by name and labels each would cost more than the request's own bookkeeping.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use metrics::{Counter, Gauge};

use super::routes::Route;
use crate::openai::Status;

/// Those of all routes.
pub(super) struct Meters {
    /// In the order of [`Route::CLASSES`].
    routes: [RouteMeters; Route::CLASSES.len()],
    /// Few of the possible ones ever occur.
    ended: Mutex<HashMap<Ended, Counter>>,
}

/// Class, code and transfer.
type Ended = (usize, Option<u16>, Status);

/// Those of one class of routes.
pub(super) struct RouteMeters {
    pub in_flight: Gauge,
    pub upstream_bytes: Counter,
    pub client_bytes: Counter,
}

impl Default for Meters {
    /// Of the metrics registry that is installed now.
    fn default() -> Self {
        let of_route = |class: &'static str| RouteMeters {
            in_flight: metrics::gauge!("draftsmith_proxy_in_flight", "route" => class),
            upstream_bytes: metrics::counter!("draftsmith_proxy_upstream_bytes_total", "route" => class),
            client_bytes: metrics::counter!("draftsmith_proxy_client_bytes_total", "route" => class),
        };
        Self { routes: Route::CLASSES.map(of_route), ended: Mutex::default() }
    }
}

impl Meters {
    pub fn of(&self, route: Route) -> &RouteMeters {
        &self.routes[route.class()]
    }

    /// A request ended so.
    pub fn ended(&self, route: Route, http_status: Option<u16>, transfer: Status) {
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let counter = ended.entry((route.class(), http_status, transfer)).or_insert_with(|| {
            let code = http_status.map_or_else(|| "none".to_owned(), |status| status.to_string());
            let (class, how) = (Route::CLASSES[route.class()], transfer.as_str());
            metrics::counter!("draftsmith_proxy_requests_total", "route" => class, "code" => code, "transfer" => how)
        });
        counter.increment(1);
    }
}
