//! The training step (forward and backward by hand), the loss, the optimizer, checkpoints and the incremental loop.
