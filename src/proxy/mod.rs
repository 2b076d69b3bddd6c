//! The request path: server, upstream client, header rules, streaming, cancellation.
