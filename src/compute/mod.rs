//! The few operations that the training step needs.
