//! The usual shape of an answer or of one delta of a stream, read without building a tree of values.
//!
//! A record of a streamed answer reads hundreds of deltas, nearly all of one shape. What does not fit that shape (a field
//! of another type, one that comes twice, an error) is left to the general reader, which takes anything.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// Text, borrowed where it has no escapes.
#[derive(Debug, Deserialize)]
pub(super) struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

impl Text<'_> {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A JSON object alone: serde would take an array of the fields' values too.
#[derive(Debug)]
pub(super) struct Object<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OfMap<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for OfMap<T> {
            type Value = Object<T>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Object<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }
        deserializer.deserialize_map(OfMap(PhantomData))
    }
}

/// The body of an answer of chat or completions, or one event's.
#[derive(Debug, Deserialize)]
pub(super) struct Piece<'a> {
    #[serde(borrow)]
    object: Option<Text<'a>>,
    error: Option<serde::de::IgnoredAny>,
    #[serde(borrow)]
    pub id: Option<Text<'a>>,
    #[serde(borrow)]
    pub model: Option<Text<'a>>,
    #[serde(borrow)]
    pub system_fingerprint: Option<Text<'a>>,
    pub usage: Option<Value>,
    pub prompt_token_ids: Option<Vec<u32>>,
    #[serde(borrow)]
    pub choices: Option<Vec<Object<ChoicePiece<'a>>>>,
}

#[derive(Debug, Deserialize)]
pub(super) struct ChoicePiece<'a> {
    pub index: Option<u64>,
    #[serde(borrow)]
    pub finish_reason: Option<Text<'a>>,
    pub stop_reason: Option<Value>,
    pub token_ids: Option<Vec<u32>>,
    pub prompt_token_ids: Option<Vec<u32>>,
    #[serde(borrow)]
    pub text: Option<Text<'a>>,
    pub logprobs: Option<Value>,
    #[serde(borrow)]
    pub delta: Option<Object<MessagePiece<'a>>>,
    #[serde(borrow)]
    pub message: Option<Object<MessagePiece<'a>>>,
}

#[derive(Debug, Deserialize)]
pub(super) struct MessagePiece<'a> {
    #[serde(borrow)]
    pub role: Option<Text<'a>>,
    #[serde(borrow)]
    pub content: Option<Text<'a>>,
    #[serde(borrow)]
    pub refusal: Option<Text<'a>>,
    #[serde(borrow)]
    pub reasoning: Option<Text<'a>>,
    #[serde(borrow)]
    pub reasoning_content: Option<Text<'a>>,
    pub tool_calls: Option<Vec<Value>>,
}

impl<'a> Piece<'a> {
    /// None if it is of another shape, or an error.
    pub fn read(json: &'a [u8]) -> Option<Self> {
        let Object(piece): Object<Piece<'a>> = serde_json::from_slice(json).ok()?;
        let is_error =
            piece.error.is_some() || piece.object.as_ref().is_some_and(|text| text.as_str() == "error");
        (!is_error).then_some(piece)
    }
}
