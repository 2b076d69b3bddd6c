//! The binary's own variables of the environment, which no test may set in its own process.

use std::process::Command;

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
