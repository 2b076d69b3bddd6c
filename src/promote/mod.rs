//! The registry of heads, the gate, promotion and roll-back.
