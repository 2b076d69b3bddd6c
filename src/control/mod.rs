//! The loopback control API, health and the metrics registry.
