//! Replaying a prompt dataset through the proxy.
