//! What clients and operators do not want recorded, through the whole sidecar: it must not be on the disk at all, in the
//! WAL of a killed process no more than in the records.

// The lint's exemption for tests does not see a test file's helpers.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use common::http::{Act, CHAT, find, json, post, read_message, upstream};
use common::sidecar::Sidecar;
use draftsmith::record::{Row, rows};
use draftsmith::store::DataDir;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

mod common {
    pub mod http;
    pub mod sidecar;
}

const SETTINGS: &str =
    "[record]\nflush_interval_ms = 0\n[privacy]\ntenant_header = \"x-tenant\"\nmodels = [\"m\"]\n";
const ANSWER: &str = r#"{"choices":[{"index":0,"message":{"role":"assistant","content":"write to joe@mail.example.org"},"finish_reason":"stop"}]}"#;

async fn ask(sidecar: &Sidecar, id: &str, headers: &str, model: &str, text: &str) {
    let body = format!(r#"{{"model":"{model}","messages":[{{"role":"user","content":"{text}"}}]}}"#);
    let mut stream = TcpStream::connect(&sidecar.address).await.unwrap();
    let head = format!("x-request-id: {id}\r\n{headers}");
    stream.write_all(&post(CHAT, &head, body.as_bytes())).await.unwrap();
    let answer = read_message(&mut stream, &mut Vec::new()).await.unwrap();
    assert_eq!((answer.status(), answer.body), (200, ANSWER.as_bytes().to_vec()), "{id}");
}

/// All bytes of all files below a directory.
fn all_bytes(directory: &Path, bytes: &mut Vec<u8>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            all_bytes(&path, bytes);
        } else {
            bytes.extend(std::fs::read(&path).unwrap());
        }
    }
}

fn request_ids(data: &DataDir) -> Vec<String> {
    let mut found: Vec<String> = rows(data).unwrap().map(|row| row.unwrap().request_id).collect();
    found.sort();
    found
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_to_be_recorded_is_never_on_the_disk() {
    let directory = tempfile::tempdir().unwrap();
    let data = DataDir::new(directory.path().join("data"));
    let up = upstream(|_, _| vec![Act::Write(json(ANSWER))]).await;
    let sidecar = Sidecar::start(directory.path(), &up.address, SETTINGS);
    ask(
        &sidecar,
        "kept",
        "x-tenant: acme-secret\r\nauthorization: Bearer hidden-key\r\n",
        "m",
        "plain-words",
    )
    .await;
    ask(&sidecar, "out", "x-draftsmith-record: off\r\n", "m", "opted-out-words").await;
    ask(&sidecar, "wrong-model", "", "another", "model-words").await;
    // The last, since rows are made in order: once it is in the WAL, so is what became of those before.
    ask(&sidecar, "found", "x-tenant: other\r\n", "m", "I am jane@mail.example.org").await;
    // Killed with everything in the WAL; the plain words show that what is looked for can be found there.
    let started = std::time::Instant::now();
    loop {
        let mut bytes = Vec::new();
        all_bytes(&data.wal(), &mut bytes);
        if find(&bytes, b"plain-words").is_some() && find(&bytes, b"I am [redacted:email]").is_some() {
            break;
        }
        assert!(started.elapsed() < Duration::from_secs(60), "the rows are not in the WAL");
        tokio::task::yield_now().await;
    }
    sidecar.kill();
    let check = || {
        let mut bytes = Vec::new();
        all_bytes(data.root(), &mut bytes);
        for secret in ["jane@", "joe@", "acme-secret", "hidden-key", "opted-out-words", "model-words"] {
            assert_eq!(find(&bytes, secret.as_bytes()), None, "{secret} is on the disk");
        }
    };
    check();

    let sidecar = Sidecar::start(directory.path(), &up.address, SETTINGS);
    sidecar.flush().await;
    check();
    assert_eq!(request_ids(&data), ["found", "kept"]);
    let found: Vec<Row> = rows(&data).unwrap().map(|row| row.unwrap()).collect();
    assert!(found.iter().all(|row| row.tenant_hash.as_ref().is_some_and(|hash| hash.len() == 32)));
    assert_ne!(found[0].tenant_hash, found[1].tenant_hash);

    // Forgetting, done by the serve that records.
    let control = sidecar.control.trim_start_matches("http://").to_owned();
    let forget = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_draftsmith"));
        command.args(["records", "forget", "--tenant", "acme-secret", "--json", "--config"]);
        command.arg(directory.path().join("draftsmith.toml")).arg("--data").arg(data.root());
        let output = command.env("DRAFTSMITH_CONTROL__LISTEN", &control).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()
    };
    assert_eq!(forget()["records"]["rows"], 1);
    assert_eq!(request_ids(&data), ["found"]);
    ask(&sidecar, "again", "x-tenant: acme-secret\r\n", "m", "plain-words").await;
    assert!(sidecar.stop().success());
    // And by the command itself.
    assert_eq!(request_ids(&data), ["again", "found"]);
    assert_eq!(forget()["records"]["rows"], 1);
    assert_eq!(request_ids(&data), ["found"]);
    let mut bytes = Vec::new();
    all_bytes(data.root(), &mut bytes);
    assert_eq!(find(&bytes, b"plain-words"), None);
}
