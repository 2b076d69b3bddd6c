//! The binary as its users call it: variables of the environment, files that cannot be used, exit codes.

// The lint's exemption for tests does not see a test file's helpers.
#![allow(clippy::unwrap_used)]

use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output};

#[test]
fn variables_that_stand_for_flags_are_no_keys_of_the_configuration() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("draftsmith.toml");
    std::fs::write(&file, "[gate]\nmin_gain = 0.125\n").unwrap();
    let show = |name: &str, value: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_draftsmith"));
        command.args(["config", "show"]).env("DRAFTSMITH_CONFIG", &file);
        command.env("DRAFTSMITH_ENVIRONMENT", directory.path()).env(name, value).output().unwrap()
    };
    let shown = show("DRAFTSMITH_STATES__UNMATCHED_SECONDS", "77");
    let text = String::from_utf8(shown.stdout).unwrap();
    assert!(text.contains("min_gain = 0.125") && text.contains("unmatched_seconds = 77"), "{text}");

    let refused = show("DRAFTSMITH_PROXY_LISTEN", "127.0.0.1:1");
    let text = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && text.contains("unknown key `proxy_listen`"), "{text}");
}

fn draftsmith(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_draftsmith")).args(arguments).output().unwrap()
}

fn told(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Nothing is bound, and nothing is written, before every file of the configuration was read.
#[test]
fn a_file_that_cannot_be_used_is_named_before_a_port_is_bound() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("draftsmith.toml");
    let absent = "/nonexistent/file";
    // Taken, so that a `serve` that gets as far as binding says so, and ends.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = taken.local_addr().unwrap();
    let data = directory.path().join("data");
    let cases = [
        ("proxy.tls_certificate_file", "[proxy]\ntls_certificate_file = \"FILE\"\ntls_key_file = \"FILE\"\n"),
        ("proxy.client_keys_file", "[proxy]\nclient_keys_file = \"FILE\"\n"),
        ("proxy.upstream_key_file", "[proxy]\nupstream_key_file = \"FILE\"\n"),
        (
            "proxy.upstream_ca_file",
            "[proxy]\nupstream = \"https://localhost:1\"\nupstream_ca_file = \"FILE\"\n",
        ),
        ("control.keys_file", "[control]\nkeys_file = \"FILE\"\n"),
        ("verifier.directory", "[verifier]\ndirectory = \"FILE\"\n"),
    ];
    for (key, text) in cases {
        std::fs::write(&file, text.replace("FILE", absent)).unwrap();
        let config = file.to_str().unwrap();
        let checked = draftsmith(&["config", "check", "--config", config]);
        assert_eq!(checked.status.code(), Some(2), "{key}: {}", told(&checked));
        let listen = listen.to_string();
        let served =
            draftsmith(&["serve", "--config", config, "--listen", &listen, "--data", data.to_str().unwrap()]);
        assert_eq!(served.status.code(), Some(1), "{key}: {}", told(&served));
        for message in [told(&checked), told(&served)] {
            assert!(message.contains(key) && message.contains(absent), "{key}: {message}");
            assert!(!message.contains("cannot bind"), "{key}: {message}");
            assert!(message.matches("No such file").count() <= 1, "the cause is told once: {message}");
        }
        assert!(!data.exists(), "{key}");
    }
    let served = draftsmith(&["serve", "--listen", &listen.to_string(), "--data", data.to_str().unwrap()]);
    assert!(told(&served).contains("cannot bind proxy.listen"), "{}", told(&served));
}

#[test]
fn config_check_tells_as_json() {
    let output = draftsmith(&["config", "check", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["usable"], output.status.code()), (&serde_json::json!(true), Some(0)));
    assert!(report["doubts"][0].as_str().unwrap().contains("states.transfer_directory"), "{report}");
    let output = draftsmith(&["config", "check", "--json", "--listen", "nowhere"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["usable"], output.status.code()), (&serde_json::json!(false), Some(2)));
    let problem = report["problem"].as_str().unwrap();
    assert!(problem.contains("proxy.listen") && problem.contains("nowhere"), "{problem}");
}

/// Kimi's models have `tiktoken.model` instead.
#[test]
fn a_verifier_without_tokenizer_json_is_a_doubt() {
    let directory = tempfile::tempdir().unwrap();
    let verifier = directory.path().join("verifier");
    std::fs::create_dir(&verifier).unwrap();
    let config = serde_json::json!({
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
        "text_config": {
            "model_type": "kimi_k2", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64,
            "num_key_value_heads": 64, "vocab_size": 163_840, "rms_norm_eps": 1e-5, "max_position_embeddings": 262_144,
        },
    });
    std::fs::write(verifier.join("config.json"), config.to_string()).unwrap();
    let file = directory.path().join("draftsmith.toml");
    let shipped = std::fs::read_to_string("configs/kimi-k2.5-8gpu.toml").unwrap();
    let moved = shipped.replace("/models/kimi-k2.5", verifier.to_str().unwrap());
    assert_ne!(shipped, moved);
    std::fs::write(&file, moved).unwrap();
    let output = draftsmith(&["config", "check", "--json", "--config", file.to_str().unwrap()]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["usable"], true, "{report}");
    assert!(report["doubts"][0].as_str().unwrap().contains("has no tokenizer.json"), "{report}");
}

#[test]
fn a_file_where_a_directory_belongs_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    for (key, text) in [
        ("data.directory", "[data]\ndirectory = \"FILE/below\"\n"),
        ("states.transfer_directory", "[states]\ntransfer_directory = \"FILE\"\n"),
    ] {
        let config = directory.path().join("draftsmith.toml");
        std::fs::write(&config, text.replace("FILE", file.to_str().unwrap())).unwrap();
        let output = draftsmith(&["config", "check", "--config", config.to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(2), "{key}");
        assert!(
            told(&output).contains(key) && told(&output).contains("choose a directory"),
            "{}",
            told(&output)
        );
    }
}

/// A mistyped directory must neither be made nor look like an empty one.
#[test]
fn commands_that_read_the_data_directory_do_not_make_it() {
    let directory = tempfile::tempdir().unwrap();
    let nope = directory.path().join("nope");
    let commands: [&[&str]; 9] = [
        &["heads", "list"],
        &["heads", "show", "live"],
        &["heads", "rollback"],
        &["records", "stats"],
        &["records", "verify"],
        &["records", "export"],
        &["train"],
        &["eval", "live"],
        &["states", "backfill", "--from", "http://127.0.0.1:1", "--transfer", "/nonexistent"],
    ];
    for command in commands {
        let output = draftsmith(&[command, &["--data", nope.to_str().unwrap()]].concat());
        assert_eq!(output.status.code(), Some(1), "{command:?}");
        assert!(told(&output).contains("data.directory = "), "{command:?}: {}", told(&output));
        assert!(!Path::new(&nope).exists(), "{command:?}");
    }
}
