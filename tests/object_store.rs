//! Copies of the records in an object store: a directory, and a server that speaks S3.

// The lint's exemption for tests does not see a test file's helpers.
#![allow(clippy::unwrap_used)]

mod common {
    pub mod environment;
    pub mod http;
    pub mod python;
    pub mod sidecar;
}

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::http::{Act, CHAT, build_request, json, read_message, upstream};
use common::python::python_with;
use common::sidecar::Sidecar;
use draftsmith::record::{
    Health, Record, RecordError, Recorder, RecorderHandle, RecorderOptions, Selection, Status, files,
    now_micros,
};
use draftsmith::store::DataDir;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

const HOUR_MICROS: i64 = 3_600_000_000;

struct Place {
    _directory: tempfile::TempDir,
    data: DataDir,
    copies: PathBuf,
}

fn place() -> Place {
    let directory = tempfile::tempdir().unwrap();
    let data = DataDir::new(directory.path().join("data"));
    let copies = directory.path().join("copies");
    Place { _directory: directory, data, copies }
}

impl Place {
    fn start(&self) -> RecorderHandle {
        let object_store = Some(format!("file://{}", self.copies.display()));
        start(&self.data, RecorderOptions { object_store, ..RecorderOptions::default() })
    }

    /// What the data directory has, and what the store has: names and bytes.
    fn check_in_step(&self, when: &str) {
        let mut kept = BTreeMap::new();
        for path in files(&self.data).unwrap() {
            let name = path.strip_prefix(self.data.records()).unwrap().to_path_buf();
            kept.insert(name, fs::read(path).unwrap());
        }
        assert!(kept == tree(&self.copies), "{when}: the store has {:?}", tree(&self.copies).keys());
    }
}

/// Starts on a directory that another recorder may just have left: a child that another test spawns holds that one's
/// lock too, between its fork and its exec.
fn start(data: &DataDir, options: RecorderOptions) -> RecorderHandle {
    let started = Instant::now();
    loop {
        match Recorder::start(data, options.clone()) {
            Err(RecordError::Locked { .. }) if started.elapsed() < Duration::from_secs(60) => {
                std::thread::yield_now()
            }
            outcome => return outcome.unwrap(),
        }
    }
}

/// All files below, hidden ones too.
fn tree(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut left = vec![directory.to_path_buf()];
    while let Some(next) = left.pop() {
        let Ok(entries) = fs::read_dir(&next) else { continue };
        for entry in entries {
            let path = entry.unwrap().path();
            if path.is_dir() {
                left.push(path);
            } else {
                found.insert(path.strip_prefix(directory).unwrap().to_path_buf(), fs::read(&path).unwrap());
            }
        }
    }
    found
}

/// Two rows in one file, of an hour that is over.
fn seal_two(recorder: &RecorderHandle, name: &str, hours_ago: i64) {
    for tenant in ["acme", "other"] {
        let started_at = now_micros() - hours_ago * HOUR_MICROS;
        let record = Record::new(format!("{name}-{tenant}"), "/v1/chat/completions", started_at);
        recorder.record(vec![Record { status: Status::Ok, tenant_hash: Some(tenant.to_owned()), ..record }]);
    }
    recorder.seal().unwrap();
}

fn of_tenant(tenant: &str) -> Selection {
    Selection { tenant_hash: Some(tenant.to_owned()), before: now_micros() }
}

#[test]
fn what_is_sealed_merged_and_forgotten_is_so_in_the_store() {
    let place = place();
    let recorder = place.start();
    for (name, hours_ago) in [("a", 3), ("b", 3), ("c", 5), ("d", 0)] {
        seal_two(&recorder, name, hours_ago);
    }
    recorder.settle_object_store().unwrap();
    assert_eq!(tree(&place.copies).len(), 4);
    place.check_in_step("sealed");

    assert_eq!(recorder.compact().unwrap().files_before, 2);
    recorder.settle_object_store().unwrap();
    assert_eq!(tree(&place.copies).len(), 3);
    place.check_in_step("merged");

    assert_eq!(recorder.forget(of_tenant("acme")).unwrap().rows, 4);
    recorder.settle_object_store().unwrap();
    assert_eq!(tree(&place.copies).len(), 3);
    place.check_in_step("rewritten");

    assert_eq!(recorder.forget(of_tenant("other")).unwrap().files_deleted, 3);
    recorder.settle_object_store().unwrap();
    assert_eq!(tree(&place.copies).len(), 0);
    assert_eq!(recorder.object_store_health(), Some(Health::Good));
    recorder.shutdown().unwrap();
}

#[test]
fn the_next_process_copies_what_is_left_and_nothing_twice() {
    let place = place();
    let recorder = place.start();
    seal_two(&recorder, "a", 0);
    let late = Record { status: Status::Ok, ..Record::new("late", "/v1/completions", now_micros()) };
    recorder.record(vec![late]);
    // Its last rows are sealed by the shutdown, and copied after that.
    recorder.shutdown().unwrap();
    drop(recorder);
    assert_eq!(tree(&place.copies).len(), 2);
    place.check_in_step("after the shutdown");

    let none = start(&place.data, RecorderOptions::default());
    assert_eq!(none.object_store_health(), None);
    seal_two(&none, "b", 0);
    none.shutdown().unwrap();
    drop(none);
    assert_eq!(tree(&place.copies).len(), 2);

    let again = place.start();
    again.settle_object_store().unwrap();
    assert_eq!(again.stats().copied_files, 1);
    place.check_in_step("after another start");
    again.shutdown().unwrap();
}

#[test]
fn a_store_that_is_away_stops_nothing_and_is_brought_up_to_date() {
    let place = place();
    fs::write(&place.copies, "in the way").unwrap();
    let recorder = place.start();
    seal_two(&recorder, "a", 0);
    let error = recorder.settle_object_store().unwrap_err().to_string();
    assert!(error.contains("not up to date") && error.contains("copies/dt="), "{error}");
    assert!(matches!(recorder.object_store_health(), Some(Health::Failing { .. })));
    assert_eq!(recorder.health(), (Health::Good, Health::Good));
    assert_eq!(recorder.stats().sealed_rows, 2);

    fs::remove_file(&place.copies).unwrap();
    recorder.settle_object_store().unwrap();
    assert_eq!(recorder.object_store_health(), Some(Health::Good));
    place.check_in_step("back again");
    recorder.shutdown().unwrap();
}

#[test]
fn an_hour_that_an_operator_removes_stays_in_the_store() {
    let place = place();
    let recorder = place.start();
    seal_two(&recorder, "a", 30);
    seal_two(&recorder, "b", 0);
    recorder.settle_object_store().unwrap();
    let before = tree(&place.copies);
    let oldest = files(&place.data).unwrap().remove(0);
    fs::remove_dir_all(oldest.parent().unwrap().parent().unwrap()).unwrap();
    assert_eq!(recorder.settle_object_store().unwrap(), 1);
    assert_eq!(tree(&place.copies), before);
    // A file alone, too.
    fs::remove_file(files(&place.data).unwrap().remove(0)).unwrap();
    assert_eq!(recorder.settle_object_store().unwrap(), 2);
    assert_eq!(tree(&place.copies), before);
    assert_eq!(recorder.stats().copied_files, 2);
    recorder.shutdown().unwrap();
}

/// Else a merge, or a process that died in a copy, would leave rows where nobody looks.
#[test]
fn what_a_killed_process_left_of_a_copy_is_removed() {
    let place = place();
    let recorder = place.start();
    seal_two(&recorder, "a", 0);
    recorder.settle_object_store().unwrap();
    let copy = place.copies.join(tree(&place.copies).into_keys().next().unwrap());
    let left = copy.with_file_name(format!("{}#1", copy.file_name().unwrap().to_string_lossy()));
    fs::write(&left, "rows").unwrap();
    assert_eq!(recorder.forget(of_tenant("acme")).unwrap().rows, 1);
    recorder.settle_object_store().unwrap();
    place.check_in_step("rewritten");
    recorder.shutdown().unwrap();
}

#[test]
fn forgetting_without_the_setting_says_that_there_are_copies() {
    let place = place();
    let recorder = place.start();
    seal_two(&recorder, "a", 0);
    recorder.shutdown().unwrap();
    drop(recorder);
    let output = Command::new(env!("CARGO_BIN_EXE_draftsmith"))
        .args(["records", "forget", "--before", "2100-01-01", "--json", "--data"])
        .arg(place.data.root())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(report["object_store_left"].as_str().unwrap().contains("record.object_store"), "{report}");
    assert_eq!(tree(&place.copies).len(), 1);

    let again = place.start();
    assert_eq!(again.settle_object_store().unwrap(), 0);
    assert_eq!(tree(&place.copies).len(), 0);
    again.shutdown().unwrap();
}

/// What a store was asked to keep, and said nothing of, may be there.
#[test]
fn an_object_of_which_no_answer_came_is_removed_with_its_file() {
    let place = place();
    let recorder = place.start();
    seal_two(&recorder, "a", 0);
    recorder.settle_object_store().unwrap();
    let before = tree(&place.copies);
    let notes = place.data.mirrored();
    let note = notes.join(tree(&notes).into_keys().next().unwrap());
    assert!(fs::read_to_string(&note).unwrap().len() > 20);
    // As it was while the object was on its way.
    fs::write(&note, "unknown\n").unwrap();
    recorder.settle_object_store().unwrap();
    assert_eq!((tree(&place.copies), recorder.stats().copied_files), (before, 2));
    fs::write(&note, "unknown\n").unwrap();
    let everyone = Selection { tenant_hash: None, before: now_micros() };
    assert_eq!(recorder.forget(everyone).unwrap().files_deleted, 1);
    recorder.settle_object_store().unwrap();
    assert_eq!((tree(&place.copies).len(), tree(&notes).len()), (0, 0));
    recorder.shutdown().unwrap();
}

#[test]
fn what_cannot_be_an_object_store_is_refused_before_anything_starts() {
    let directory = tempfile::tempdir().unwrap();
    let inside = format!("file://{}/data/copies", directory.path().display());
    for (url, remedy) in [("ftp://host/x", "s3://BUCKET"), (inside.as_str(), "choose another")] {
        let output = Command::new(env!("CARGO_BIN_EXE_draftsmith"))
            .args(["config", "check", "--data"])
            .arg(directory.path().join("data"))
            .env("DRAFTSMITH_RECORD__OBJECT_STORE", url)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{url}");
        assert!(
            said.contains("record.object_store") && said.contains(url) && said.contains(remedy),
            "{said}"
        );
    }
}

/// A server of a Python package, killed when this is dropped.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Server {
    /// Starts a module that says its port after `mark`.
    fn start(arguments: &[&str], mark: &str) -> (Self, String) {
        let mut command = python_with("object-stores");
        let mut child =
            command.arg("-u").args(arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let mut said = String::new();
        let port = loop {
            let Some(line) = lines.next() else { panic!("the server ended: {said}") };
            if let Some((_, rest)) = line.split_once(mark) {
                break rest.chars().take_while(char::is_ascii_digit).collect::<String>();
            }
            said.push_str(&line);
        };
        // A pipe that nobody reads would stop it one day.
        std::thread::spawn(move || lines.for_each(drop));
        (Server(child), port)
    }
}

/// Serves one answer of 20 MB and three small ones, has them sealed, and forgets one tenant's; gives what is to be in the
/// store, by name, at the end.
async fn record_and_forget(url: &str, environment: &[(&str, String)]) -> BTreeMap<String, Vec<u8>> {
    let directory = tempfile::tempdir().unwrap();
    let data = DataDir::new(directory.path().join("data"));
    let up = upstream(|number, _| {
        // Nothing that a codec makes small: the copy goes up in parts.
        let mut state = 0x2545_f491_4f6c_dd1d_u64 + number as u64;
        let length = if number == 0 { 20_000_000 } else { 40 };
        let mut content = String::with_capacity(length);
        while content.len() < length {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            content.push(char::from(b'!' + (state % 90) as u8));
        }
        let text = serde_json::Value::from(content);
        vec![Act::Write(json(&format!(
            r#"{{"id":"x","object":"chat.completion","model":"m","choices":[{{"index":0,"message":{{"role":"assistant","content":{text}}},"finish_reason":"stop"}}]}}"#
        )))]
    })
    .await;
    let settings =
        format!("[privacy]\ntenant_header = \"x-tenant\"\nredact = []\n[record]\nobject_store = \"{url}\"\n");
    let sidecar = Sidecar::start_with(directory.path(), &up.address, &settings, environment);
    for tenant in ["large", "acme", "other", "acme"] {
        let body = br#"{"model":"m","messages":[{"role":"user","content":"hello"}]}"#;
        let request = build_request("POST", CHAT, &format!("x-tenant: {tenant}\r\n"), body);
        let mut stream = TcpStream::connect(&sidecar.address).await.unwrap();
        stream.write_all(&request).await.unwrap();
        assert_eq!(read_message(&mut stream, &mut Vec::new()).await.unwrap().status(), 200);
        sidecar.flush().await;
    }
    // So that there is something to remove.
    let started = Instant::now();
    let client = draftsmith::http::client().unwrap();
    loop {
        let answer = client.get(format!("{}/readyz", sidecar.control)).send().await.unwrap();
        let parts = answer.text().await.unwrap();
        if parts.contains(r#""part":"object_store","ready":true,"detail":"good; 4 files copied""#) {
            break;
        }
        assert!(started.elapsed() < Duration::from_secs(60), "{parts}");
    }
    let control = sidecar.control.trim_start_matches("http://").to_owned();
    let output = Command::new(env!("CARGO_BIN_EXE_draftsmith"))
        .args(["records", "forget", "--tenant", "acme", "--json", "--config"])
        .arg(directory.path().join("draftsmith.toml"))
        .arg("--data")
        .arg(data.root())
        .env("DRAFTSMITH_CONTROL__LISTEN", &control)
        .envs(environment.iter().map(|(name, value)| (name, value)))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["records"]["files_deleted"], 2, "{report}");
    assert!(report["object_store_left"].is_null(), "{report}");
    assert!(sidecar.stop().success());
    let mut expected = BTreeMap::new();
    for path in files(&data).unwrap() {
        let name = path.strip_prefix(data.records()).unwrap().to_string_lossy().into_owned();
        expected.insert(name, fs::read(path).unwrap());
    }
    assert_eq!(expected.len(), 2);
    assert!(expected.values().any(|bytes| bytes.len() > 9 << 20), "one is large enough for parts");
    expected
}

/// Each expected object is there whole, and no other.
async fn check(
    client: &reqwest::Client,
    expected: &BTreeMap<String, Vec<u8>>,
    listing: &str,
    object: impl Fn(&str) -> String,
) {
    let listed = client.get(listing).send().await.unwrap().text().await.unwrap();
    assert_eq!(listed.matches(".parquet").count() % expected.len(), 0, "{listed}");
    let names: std::collections::BTreeSet<&str> =
        listed.split(['<', '>', '"', '/', '?']).filter(|part| part.ends_with(".parquet")).collect();
    assert_eq!(names.len(), expected.len(), "{listed}");
    for (name, bytes) in expected {
        let answer = client.get(object(name)).send().await.unwrap();
        assert_eq!(answer.status(), 200, "{name}");
        assert!(answer.bytes().await.unwrap() == bytes.as_slice(), "{name} differs");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "installs a server that speaks S3"]
async fn a_bucket_of_s3_behind_tls() {
    let directory = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let (certificate, key) = (directory.path().join("certificate.pem"), directory.path().join("key.pem"));
    fs::write(&certificate, made.cert.pem()).unwrap();
    fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let arguments =
        ["-m", "moto.server", "-p", "0", "-c", certificate.to_str().unwrap(), "-k", key.to_str().unwrap()];
    let (_server, port) = Server::start(&arguments, "https://127.0.0.1:");
    let base = format!("https://localhost:{port}");
    let trusted = reqwest::Certificate::from_pem(made.cert.pem().as_bytes()).unwrap();
    // Reading is for those who have a name; the server asks for no proof of it.
    let mut name = reqwest::header::HeaderMap::new();
    let claim = "AWS4-HMAC-SHA256 Credential=test/20261201/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0";
    name.insert("authorization", claim.parse().unwrap());
    let builder = draftsmith::http::client_builder().tls_certs_merge([trusted]).default_headers(name);
    let client = builder.build().unwrap();
    assert!(client.put(format!("{base}/bucket")).send().await.unwrap().status().is_success());
    let environment = [
        ("AWS_ACCESS_KEY_ID", "test".to_owned()),
        ("AWS_SECRET_ACCESS_KEY", "secret".to_owned()),
        ("AWS_REGION", "us-east-1".to_owned()),
        ("AWS_ENDPOINT", base.clone()),
        ("SSL_CERT_FILE", certificate.display().to_string()),
    ];
    let expected = record_and_forget("s3://bucket/some/where", &environment).await;
    let listing = format!("{base}/bucket?list-type=2");
    check(&client, &expected, &listing, |name| format!("{base}/bucket/some/where/{name}")).await;
}
