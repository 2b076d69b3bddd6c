//! Paths, atomic publishing and manifests.
