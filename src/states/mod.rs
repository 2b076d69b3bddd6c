//! Hidden states: collecting from vLLM, verifying, bounded shards, reading batches.
