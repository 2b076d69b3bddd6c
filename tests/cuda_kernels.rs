//! Every kernel compiles for Hopper: NVRTC needs no GPU. `.ci/nvrtc.sh` installs it; without it the test says so and passes.

use std::path::PathBuf;
use std::process::Command;

use draftsmith::compute::cuda::{Shape, compile, compiler_is_present};

/// Where `.ci/nvrtc.sh` puts the library.
fn library_directory() -> Option<PathBuf> {
    let directory = PathBuf::from(std::env::var_os("HOME")?).join(".cache/draftsmith/nvrtc/nvidia/cu13/lib");
    directory.is_dir().then_some(directory)
}

#[test]
fn kernels_compile_for_hopper() {
    if compiler_is_present() {
        return compile_all();
    }
    assert!(std::env::var_os("DRAFTSMITH_TEST_NVRTC").is_none(), "NVRTC is installed but cannot be opened");
    let Some(directory) = library_directory() else {
        eprintln!("skipped: no NVRTC here; run .ci/nvrtc.sh");
        return;
    };
    // The loader reads the path at the start of a process.
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "kernels_compile_for_hopper", "--nocapture"])
        .env("LD_LIBRARY_PATH", directory)
        .env("DRAFTSMITH_TEST_NVRTC", "required")
        .status()
        .unwrap();
    assert!(child.success());
}

fn compile_all() {
    let shape = |hidden, inner, heads, key_heads, head_dim, vocabulary| Shape {
        hidden,
        inner,
        heads,
        key_heads,
        head_dim,
        vocabulary,
    };
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
    assert!(shape(100, 512, 2, 2, 64, 1000).check().is_err());
    assert!(shape(256, 512, 2, 2, 80, 1000).check().is_err());
}
