//! Request ids. A record and its hidden states meet by this id, so no two requests may share one.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use hyper::HeaderMap;

use super::headers::REQUEST_ID;

/// How many of the last ids are remembered.
const REMEMBERED: usize = 65_536;

/// Gives each request its id.
#[derive(Debug, Default)]
pub(super) struct RequestIds {
    recent: Mutex<Recent>,
}

#[derive(Debug, Default)]
struct Recent {
    known: HashSet<Arc<str>>,
    order: VecDeque<Arc<str>>,
}

impl RequestIds {
    /// The client's own id if it is well formed and new, else a fresh UUID v7.
    pub(super) fn choose(&self, headers: &HeaderMap) -> String {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let mut given = headers.get_all(REQUEST_ID).iter();
        if let (Some(first), None) = (given.next(), given.next())
            && let Ok(id) = first.to_str()
            && is_well_formed(id)
            && recent.remember(id)
        {
            return id.to_owned();
        }
        loop {
            let id = uuid::Uuid::now_v7().simple().to_string();
            if recent.remember(&id) {
                return id;
            }
        }
    }
}

impl Recent {
    /// False if the id is known already.
    fn remember(&mut self, id: &str) -> bool {
        if self.known.contains(id) {
            return false;
        }
        if self.order.len() == REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
        let shared: Arc<str> = Arc::from(id);
        self.order.push_back(shared.clone());
        self.known.insert(shared);
        true
    }
}

/// The id becomes part of file names: no separators, not hidden.
fn is_well_formed(id: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    (1..=64).contains(&id.len()) && !id.starts_with('.') && id.bytes().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::header::HeaderValue;

    fn with(ids: &[&str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for id in ids {
            headers.append(REQUEST_ID, HeaderValue::from_str(id).unwrap());
        }
        headers
    }

    #[test]
    fn a_clients_id_is_kept_once() {
        let ids = RequestIds::default();
        assert_eq!(ids.choose(&with(&["Job-1_a.b"])), "Job-1_a.b");
        let second = ids.choose(&with(&["Job-1_a.b"]));
        assert_eq!(second.len(), 32);
        assert_ne!(ids.choose(&with(&[&second])), second);
    }

    #[test]
    fn other_ids_are_replaced() {
        let ids = RequestIds::default();
        let long = "a".repeat(65);
        for given in ["", ".hidden", "..", "a/b", "a b", "a%2f", &long] {
            assert_eq!(ids.choose(&with(&[given])).len(), 32, "{given}");
        }
        assert_eq!(ids.choose(&with(&["one", "two"])).len(), 32);
        assert_eq!(ids.choose(&with(&[&long[..64]])), long[..64]);
    }

    #[test]
    fn memory_is_bounded() {
        let ids = RequestIds::default();
        for number in 0..=REMEMBERED {
            ids.choose(&with(&[&format!("n{number}")]));
        }
        assert_eq!(ids.recent.lock().unwrap().known.len(), REMEMBERED);
        assert_eq!(ids.choose(&with(&["n0"])), "n0", "the oldest is forgotten");
        assert_ne!(ids.choose(&with(&["n2"])), "n2");
    }
}
