//! EAGLE-3 heads: configuration, both checkpoint formats, vocabulary map, compatibility checks.
