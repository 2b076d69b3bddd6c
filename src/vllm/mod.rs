//! vLLM's control routes, and the plugin that this binary carries.
