//! Flags and commands, one file per command; no logic.
