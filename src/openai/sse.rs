//! Server-sent events, decoded as the bytes come.
//!
//! Lines end in LF, CRLF or CR, wherever the chunks are cut. The decoder works on bytes, so a UTF-8 character may be cut
//! too. Every byte that goes in comes out in some event's `raw`, in order.

/// One event, or a block of comments and other fields without data.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Event {
    /// The bytes as they came, with the blank line that ends the event. When CRLF is cut in the middle, the LF comes at
    /// the head of the next event's bytes.
    pub raw: Vec<u8>,
    /// The `data:` lines joined by LF; none if there was no such line.
    pub data: Option<Vec<u8>>,
    pub data_lines: usize,
}

/// Cuts a byte stream into [`Event`]s.
#[derive(Debug, Default)]
pub struct Decoder {
    pending: Vec<u8>,
    /// Where the line now being read starts in `pending`.
    line_start: usize,
    data: Option<Vec<u8>>,
    data_lines: usize,
    /// The last byte was a CR: a LF that follows belongs to it.
    after_cr: bool,
    /// Past the first line, before which a byte-order mark may stand.
    past_first_line: bool,
}

impl Decoder {
    pub fn new() -> Self {
        Self::default()
    }

    /// Bytes held back because their event has not ended.
    pub fn pending_bytes(&self) -> usize {
        self.pending.len()
    }

    /// Takes the next bytes; gives the events that they end.
    pub fn push(&mut self, bytes: &[u8]) -> Vec<Event> {
        let mut events = Vec::new();
        let mut rest = bytes;
        while let Some(first) = rest.first() {
            if std::mem::take(&mut self.after_cr) && *first == b'\n' {
                self.pending.push(b'\n');
                rest = &rest[1..];
                self.take_lf_of_crlf(&mut events);
                continue;
            }
            let Some(at) = memchr::memchr2(b'\n', b'\r', rest) else {
                self.pending.extend_from_slice(rest);
                break;
            };
            self.pending.extend_from_slice(&rest[..=at]);
            self.after_cr = rest[at] == b'\r';
            rest = &rest[at + 1..];
            let line_end = self.pending.len() - 1;
            if line_end > self.line_start {
                self.take_line(line_end);
                self.line_start = self.pending.len();
                continue;
            }
            self.line_start = self.pending.len();
            if self.holds_only_line_ends() {
                // A blank line that ends nothing: it goes with the event that follows.
                continue;
            }
            events.push(self.take_event());
        }
        events
    }

    /// The stream has ended: what is left is an event, even without its blank line.
    pub fn finish(&mut self) -> Option<Event> {
        if self.pending.is_empty() {
            return None;
        }
        let line_end = self.pending.len();
        if line_end > self.line_start {
            self.take_line(line_end);
        }
        Some(self.take_event())
    }

    fn take_lf_of_crlf(&mut self, events: &mut [Event]) {
        self.line_start = self.pending.len();
        // The CR already ended an event of this very chunk: give it its LF back.
        if self.pending.len() == 1
            && let Some(last) = events.last_mut()
        {
            last.raw.append(&mut self.pending);
            self.line_start = 0;
        }
    }

    fn holds_only_line_ends(&self) -> bool {
        self.data.is_none() && self.pending.iter().all(|byte| matches!(byte, b'\n' | b'\r'))
    }

    fn take_line(&mut self, line_end: usize) {
        let mut line = &self.pending[self.line_start..line_end];
        if !std::mem::replace(&mut self.past_first_line, true) {
            line = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line);
        }
        let Some(rest) = line.strip_prefix(b"data") else {
            return;
        };
        let value = match rest {
            [] => rest,
            [b':', b' ', value @ ..] => value,
            [b':', value @ ..] => value,
            _ => return,
        };
        self.data_lines += 1;
        match &mut self.data {
            Some(data) => {
                data.push(b'\n');
                data.extend_from_slice(value);
            }
            None => self.data = Some(value.to_vec()),
        }
    }

    fn take_event(&mut self) -> Event {
        self.line_start = 0;
        // The next event is likely as long.
        let room = Vec::with_capacity(self.pending.len());
        Event {
            raw: std::mem::replace(&mut self.pending, room),
            data: self.data.take(),
            data_lines: std::mem::take(&mut self.data_lines),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decode(chunks: &[&[u8]]) -> (Vec<String>, Vec<u8>) {
        let mut decoder = Decoder::new();
        let mut events = Vec::new();
        for chunk in chunks {
            events.extend(decoder.push(chunk));
        }
        events.extend(decoder.finish());
        let raw = events.iter().flat_map(|event| event.raw.clone()).collect();
        let data = events.into_iter().filter_map(|event| event.data);
        (data.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).collect(), raw)
    }

    #[test]
    fn every_line_end_and_field_form_is_read() {
        for end in ["\n", "\r\n", "\r"] {
            let text = ": comment||data: one||event: x|data:two|data: three|id: 7||data|data:||data: last"
                .replace('|', end);
            let (data, raw) = decode(&[text.as_bytes()]);
            assert_eq!(data, ["one", "two\nthree", "\n", "last"], "{end:?}");
            assert_eq!(raw, text.as_bytes());
        }
    }

    #[test]
    fn an_event_comes_out_with_its_last_byte() {
        let mut decoder = Decoder::new();
        assert!(decoder.push(b"data: {}\n").is_empty());
        assert_eq!(decoder.push(b"\n").len(), 1);
        assert_eq!(decoder.push(b"data: {}\r\r").len(), 1);
        assert_eq!(decoder.finish(), None);
    }

    #[test]
    fn a_byte_order_mark_is_passed_over() {
        assert_eq!(decode(&[b"\xef\xbb\xbfdata: x\n\n"]).0, ["x"]);
    }

    proptest! {
        #[test]
        fn cuts_change_nothing(
            lines in prop::collection::vec("(data: ?|: |event: |data)?[aÉ日 ]{0,3}", 0..12),
            ends in prop::collection::vec(prop::sample::select(vec!["\n", "\r\n", "\r", "\n\n", "\r\n\r\n", "\r\r"]), 12),
            cuts in prop::collection::vec(1usize..9, 1..20),
        ) {
            let text: String = lines.iter().zip(&ends).flat_map(|(line, end)| [line.as_str(), end]).collect();
            let whole = decode(&[text.as_bytes()]);
            let mut chunks = Vec::new();
            let mut rest = text.as_bytes();
            for cut in cuts.iter().cycle() {
                if rest.is_empty() { break; }
                let (head, tail) = rest.split_at((*cut).min(rest.len()));
                chunks.push(head);
                rest = tail;
            }
            let cut_up = decode(&chunks);
            prop_assert_eq!(&cut_up, &whole);
            prop_assert_eq!(whole.1, text.as_bytes());
        }
    }
}
