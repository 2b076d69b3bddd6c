//! The TOML file, its defaults, and the checks that run before a port is bound.
