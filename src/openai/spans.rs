//! Finds the byte spans of a JSON text's members and elements, so that one of them can be edited and all else stays.
//!
//! It reads structure alone and takes valid JSON for granted: given anything else it finds nothing or skips oddly, but
//! never panics. Nesting costs no stack.

use std::ops::Range;

/// One `"key": value` of an object.
#[derive(Clone, Debug, PartialEq)]
pub struct Member {
    /// The key with its escapes resolved.
    pub key: String,
    pub value: Range<usize>,
}

/// The members of the object that starts at `at` (white space before it is passed over), in their order.
pub fn members(text: &[u8], at: usize) -> Option<Vec<Member>> {
    let mut position = skip_space(text, at);
    if text.get(position) != Some(&b'{') {
        return None;
    }
    position = skip_space(text, position + 1);
    let mut found = Vec::new();
    if text.get(position) == Some(&b'}') {
        return Some(found);
    }
    loop {
        let key_end = skip_string(text, position)?;
        let key = read_key(&text[position..key_end])?;
        position = skip_space(text, key_end);
        if text.get(position) != Some(&b':') {
            return None;
        }
        let start = skip_space(text, position + 1);
        let end = skip_value(text, start)?;
        found.push(Member { key, value: start..end });
        position = skip_space(text, end);
        match text.get(position)? {
            b',' => position = skip_space(text, position + 1),
            b'}' => return Some(found),
            _ => return None,
        }
    }
}

/// The elements of the array that starts at `at`.
pub fn elements(text: &[u8], at: usize) -> Option<Vec<Range<usize>>> {
    let mut position = skip_space(text, at);
    if text.get(position) != Some(&b'[') {
        return None;
    }
    position = skip_space(text, position + 1);
    let mut found = Vec::new();
    if text.get(position) == Some(&b']') {
        return Some(found);
    }
    loop {
        let end = skip_value(text, position)?;
        found.push(position..end);
        position = skip_space(text, end);
        match text.get(position)? {
            b',' => position = skip_space(text, position + 1),
            b']' => return Some(found),
            _ => return None,
        }
    }
}

/// The first position from `at` on that holds no JSON white space.
pub fn skip_space(text: &[u8], at: usize) -> usize {
    let rest = text.get(at..).unwrap_or_default();
    let space = rest.iter().take_while(|byte| matches!(byte, b' ' | b'\n' | b'\r' | b'\t')).count();
    at + space
}

fn read_key(quoted: &[u8]) -> Option<String> {
    if quoted.contains(&b'\\') {
        return serde_json::from_slice(quoted).ok();
    }
    let inside = quoted.get(1..quoted.len().checked_sub(1)?)?;
    std::str::from_utf8(inside).ok().map(str::to_owned)
}

/// The end of the string that starts at `at`, past its closing quote.
fn skip_string(text: &[u8], at: usize) -> Option<usize> {
    if text.get(at) != Some(&b'"') {
        return None;
    }
    let mut position = at + 1;
    loop {
        match text.get(position)? {
            b'"' => return Some(position + 1),
            b'\\' => position += 2,
            _ => position += 1,
        }
    }
}

/// The end of the value that starts at `at`.
fn skip_value(text: &[u8], at: usize) -> Option<usize> {
    let mut position = at;
    let mut depth = 0usize;
    loop {
        match text.get(position)? {
            b'"' => position = skip_string(text, position)?,
            b'{' | b'[' => {
                depth += 1;
                position += 1;
            }
            b'}' | b']' => {
                depth = depth.checked_sub(1)?;
                position += 1;
            }
            b' ' | b'\n' | b'\r' | b'\t' | b',' | b':' if depth > 0 => position += 1,
            _ => {
                let start = position;
                while text
                    .get(position)
                    .is_some_and(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'+' | b'.'))
                {
                    position += 1;
                }
                if position == start {
                    return None;
                }
            }
        }
        if depth == 0 {
            return Some(position);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn spans_are_the_values() {
        let text = br#" { "a" : [1, {"b":"]}\""}] ,"\u0063":null, "d":-1.5e+3}"#;
        let found = members(text, 0).unwrap();
        let values: Vec<_> = found
            .iter()
            .map(|member| (member.key.as_str(), std::str::from_utf8(&text[member.value.clone()]).unwrap()))
            .collect();
        assert_eq!(values, [("a", r#"[1, {"b":"]}\""}]"#), ("c", "null"), ("d", "-1.5e+3")]);
        assert_eq!(elements(text, found[0].value.start).unwrap().len(), 2);
        assert_eq!(members(b"{}", 0).unwrap(), []);
    }

    #[test]
    fn broken_text_gives_nothing() {
        for text in [
            "",
            "{",
            "{\"a",
            "{\"a\"",
            "{\"a\":",
            "{\"a\":[",
            "{\"a\":1",
            "{\"a\":1]",
            "[1,2]",
            "{\"a\":\"\\",
        ] {
            assert_eq!(members(text.as_bytes(), 0), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn never_panics(text in prop::collection::vec(prop::sample::select(b"{}[]\",:\\ a1u0-\xc3".to_vec()), 0..40)) {
            members(&text, 0);
            elements(&text, 0);
        }
    }
}
