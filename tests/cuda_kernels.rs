//! Every kernel compiles for Hopper: NVRTC needs no GPU, and comes with vLLM's PyTorch.

// The lint's exemption for tests does not see a test file's helpers.
#![allow(clippy::unwrap_used)]

mod common {
    pub mod environment;
}

use std::path::PathBuf;
use std::process::Command;

use draftsmith::compute::cuda::{Shape, compile, compiler_is_present};

/// Set for the process that finds NVRTC by the loader's path.
const IN_CHILD: &str = "NVRTC_IS_ON_THE_PATH";

fn library_directory() -> PathBuf {
    let libraries = common::environment::environment().join("venv/lib");
    let entries = std::fs::read_dir(&libraries).unwrap();
    let mut names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let python = names.find(|name| name.starts_with("python3")).expect("a venv holds its Python's packages");
    libraries.join(python).join("site-packages/nvidia/cu13/lib")
}

#[test]
#[ignore = "real NVRTC: seconds, once vLLM's environment is installed"]
fn kernels_compile_for_hopper() {
    if compiler_is_present() {
        return compile_all();
    }
    let directory = library_directory();
    assert!(std::env::var_os(IN_CHILD).is_none(), "NVRTC cannot be opened in {}", directory.display());
    // The loader reads the path at the start of a process.
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "kernels_compile_for_hopper", "--ignored", "--nocapture"])
        .env("LD_LIBRARY_PATH", directory)
        .env(IN_CHILD, "yes")
        .status()
        .unwrap();
    assert!(child.success());
}

fn shape(
    hidden: usize,
    inner: usize,
    heads: usize,
    key_heads: usize,
    head_dim: usize,
    vocabulary: usize,
) -> Shape {
    Shape { hidden, inner, heads, key_heads, head_dim, vocabulary }
}

#[test]
fn shapes_that_the_kernels_do_not_know_are_refused() {
    for (unknown, word) in [
        (shape(100, 512, 2, 2, 64, 1000), "hidden_size is 100"),
        (shape(256, 512, 2, 2, 80, 1000), "head_dim is 80"),
    ] {
        let message = unknown.check().unwrap_err().to_string();
        assert!(message.contains(word), "{message}");
    }
}

fn compile_all() {
    let shapes = [
        shape(4096, 14_336, 32, 8, 128, 32_000),
        shape(7168, 18_432, 64, 64, 128, 32_000),
        shape(576, 1536, 9, 3, 64, 49_152),
        shape(5376, 21_504, 32, 16, 256, 32_000),
        shape(256, 512, 2, 2, 192, 1000),
    ];
    for shape in shapes {
        shape.check().expect("a shape that the kernels know");
        let image = compile(&shape, "sm_90a").expect("kernels that compile");
        assert!(image.starts_with(b"\x7fELF"), "{shape:?}");
    }
}
