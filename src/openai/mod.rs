//! The wire shapes that we read: SSE frames, deltas, usage, errors. Lenient; unknown fields are kept.
