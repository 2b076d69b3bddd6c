//! The command line that starts vLLM with the plugin.

use std::fmt;
use std::path::PathBuf;

use serde_json::json;

/// What the launch line is made from.
#[derive(Clone, Debug)]
pub struct LaunchOptions {
    /// The verifier: a directory or a name that vLLM knows.
    pub model: String,
    /// Head to start with: `config.json` and `model.safetensors`.
    pub head: PathBuf,
    /// Where the tap puts the states of finished requests; the collector empties it. `/dev/shm` is good.
    pub transfer: PathBuf,
    /// Directory that [`super::plugin::write`] filled.
    pub plugin: PathBuf,
    /// K, tokens drafted in each step.
    pub speculative_tokens: usize,
    /// Further vLLM arguments, as they are.
    pub extra: Vec<String>,
}

/// A command to start vLLM. `Display` gives it as one line for a POSIX shell.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// To be added to the environment.
    pub environment: Vec<(String, String)>,
    /// The program and its arguments.
    pub arguments: Vec<String>,
}

/// Builds the launch command. Nothing is checked on disk: it may be meant for another machine.
pub fn launch(options: &LaunchOptions) -> Launch {
    let speculative = json!({
        "method": "eagle3",
        "model": options.head.to_string_lossy(),
        "num_speculative_tokens": options.speculative_tokens,
    });
    let transfer = json!({
        "kv_connector": "DraftsmithConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"transfer_dir": options.transfer.to_string_lossy()},
    });
    let mut arguments = vec!["vllm".to_owned(), "serve".to_owned(), options.model.clone()];
    for (flag, value) in [
        ("--host", "127.0.0.1".to_owned()),
        ("--speculative-config", speculative.to_string()),
        ("--kv-transfer-config", transfer.to_string()),
        ("--weight-transfer-config", json!({"backend": "draftsmith"}).to_string()),
        ("--worker-extension-cls", "draftsmith_vllm.worker.DraftsmithWorker".to_owned()),
    ] {
        // an argument of the user's own takes the place of ours
        let given = options.extra.iter().any(|word| word.split('=').next() == Some(flag));
        if !given {
            arguments.push(flag.to_owned());
            arguments.push(value);
        }
    }
    arguments.extend(options.extra.iter().cloned());
    let environment = vec![
        // without it vLLM has neither the weight routes nor /collective_rpc
        ("VLLM_SERVER_DEV_MODE".to_owned(), "1".to_owned()),
        ("PYTHONPATH".to_owned(), options.plugin.to_string_lossy().into_owned()),
    ];
    Launch { environment, arguments }
}

impl fmt::Display for Launch {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, value) in &self.environment {
            write!(formatter, "{name}={} ", quoted(value))?;
        }
        let words: Vec<String> = self.arguments.iter().map(|word| quoted(word)).collect();
        formatter.write_str(&words.join(" "))
    }
}

/// One word for a POSIX shell.
fn quoted(word: &str) -> String {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "-_./:=,@%+".contains(letter);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> LaunchOptions {
        LaunchOptions {
            model: "model".to_owned(),
            head: "it's a head".into(),
            transfer: "/dev/shm/states".into(),
            plugin: "/opt/plugin".into(),
            speculative_tokens: 3,
            extra: vec!["--port".to_owned(), "8100".to_owned()],
        }
    }

    #[test]
    fn the_shell_reads_back_what_was_meant() {
        let made = launch(&options());
        let line = made.to_string();
        let command = line.split_once("vllm serve").unwrap().1;
        let output = std::process::Command::new("sh")
            .args(["-c", &format!("printf '%s\\n' vllm serve{command}")])
            .output()
            .unwrap();
        let words: Vec<String> =
            String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect();
        assert_eq!(words, made.arguments);
        let at = words.iter().position(|word| word == "--speculative-config").unwrap();
        let config: serde_json::Value = serde_json::from_str(&words[at + 1]).unwrap();
        assert_eq!(config["model"], "it's a head");
        assert_eq!(config["num_speculative_tokens"], 3);
    }

    #[test]
    fn an_argument_of_the_users_own_wins() {
        let mut given = options();
        given.extra = vec!["--host=0.0.0.0".to_owned()];
        let made = launch(&given);
        assert!(!made.arguments.contains(&"127.0.0.1".to_owned()));
        assert!(made.arguments.contains(&"--host=0.0.0.0".to_owned()));
    }
}
