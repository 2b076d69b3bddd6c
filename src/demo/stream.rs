//! A stream in flight while the head is swapped: its text must not change, and its largest gap is the swap's price.

use std::time::{Duration, Instant};

use anyhow::Context;
use futures_util::StreamExt;
use serde::Serialize;
use serde_json::json;

/// One streamed answer and when its pieces came.
#[derive(Clone, Debug)]
struct StreamedAnswer {
    text: String,
    gaps: Vec<Duration>,
    ended: Instant,
}

/// What a swap did to a stream.
#[derive(Clone, Debug, Serialize)]
pub struct SwapUnderLoad {
    /// The stream's text equals the text without a swap.
    pub same_text: bool,
    /// The new head was in before the stream's last piece came: it ran under both heads.
    pub within_the_stream: bool,
    pub largest_gap_ms: f64,
    pub usual_gap_ms: f64,
    /// From the first control call to the last answer.
    pub swap_ms: f64,
}

/// Streams one greedy answer; calls `at_chunk` with the number of pieces so far.
async fn stream_answer(
    base: &str,
    prompt: &str,
    max_tokens: usize,
    mut at_chunk: impl FnMut(usize),
) -> anyhow::Result<StreamedAnswer> {
    let body = json!({
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens, "temperature": 0, "stream": true, "ignore_eos": true,
    });
    let response = crate::http::client()?
        .post(format!("{base}/v1/chat/completions"))
        .json(&body)
        .send()
        .await?
        .error_for_status()?;
    let mut bytes = response.bytes_stream();
    let mut decoder = crate::openai::sse::Decoder::new();
    let mut answer = StreamedAnswer { text: String::new(), gaps: Vec::new(), ended: Instant::now() };
    let mut last: Option<Instant> = None;
    let mut count = 0;
    while let Some(chunk) = bytes.next().await {
        for event in decoder.push(&chunk?) {
            let Some(data) = event.data.filter(|data| data.as_slice() != b"[DONE]") else {
                continue;
            };
            let value: serde_json::Value =
                serde_json::from_slice(&data).context("a chunk that is no JSON")?;
            let Some(text) = value["choices"][0]["delta"]["content"].as_str() else {
                continue;
            };
            answer.text.push_str(text);
            let now = Instant::now();
            if let Some(previous) = last {
                answer.gaps.push(now - previous);
            }
            last = Some(now);
            count += 1;
            at_chunk(count);
        }
    }
    answer.ended = last.context("a stream without text")?;
    Ok(answer)
}

/// Streams the same greedy answer twice, alone; the second time a head is swapped in after some pieces.
pub async fn swap_under_load(proxy: &str, head: &str, config: &str) -> anyhow::Result<SwapUnderLoad> {
    const PROMPT: &str = "Tell me about the history of the bicycle.";
    const TOKENS: usize = 160;
    /// Pieces before the swap begins.
    const UNDER_WAY: usize = 20;
    let undisturbed = stream_answer(proxy, PROMPT, TOKENS, |_| {}).await?;
    let (under_way, started) = tokio::sync::oneshot::channel();
    let mut under_way = Some(under_way);
    let streaming = stream_answer(proxy, PROMPT, TOKENS, |count| {
        if count == UNDER_WAY
            && let Some(sender) = under_way.take()
        {
            // The receiver is gone only if the swap has failed, which is told below.
            let _ = sender.send(());
        }
    });
    let swapping = async {
        started.await.context("the stream ended before the swap began")?;
        let swapped = super::run_json(&["swap", head, "--config", config, "--json"]).await?;
        anyhow::Ok((swapped, Instant::now()))
    };
    let (streamed, swapped) = tokio::join!(streaming, swapping);
    let (streamed, (swapped, swapped_at)) = (streamed?, swapped?);
    Ok(SwapUnderLoad {
        within_the_stream: swapped_at < streamed.ended,
        same_text: streamed.text == undisturbed.text,
        largest_gap_ms: streamed.gaps.iter().max().map_or(0.0, |gap| gap.as_secs_f64() * 1e3),
        usual_gap_ms: median_ms(&undisturbed.gaps),
        swap_ms: swapped["total_ms"].as_f64().context("`draftsmith swap` gave no time")?,
    })
}

/// The median of some gaps, in milliseconds.
fn median_ms(gaps: &[Duration]) -> f64 {
    let mut sorted = gaps.to_vec();
    sorted.sort();
    sorted.get(sorted.len() / 2).map_or(0.0, |gap| gap.as_secs_f64() * 1e3)
}
