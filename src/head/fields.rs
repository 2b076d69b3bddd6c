//! Typed reading of a config.json: a field that has the wrong type is an error that names it.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value};

use super::error::HeadError;

/// One JSON object of a file, with the path that leads to it.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a> {
    pub path: &'a Path,
    /// "" at the top, else like "text_config."
    pub prefix: &'a str,
    pub object: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub fn name(&self, field: &str) -> String {
        format!("{}{field}", self.prefix)
    }

    /// The field's value; null counts as absent, as in transformers.
    pub fn value(&self, field: &str) -> Option<&'a Value> {
        self.object.get(field).filter(|value| !value.is_null())
    }

    pub fn bad(&self, field: &str, found: &Value, expected: impl ToString) -> HeadError {
        HeadError::bad_field(self.path, &self.name(field), found, expected)
    }

    pub fn missing(&self, field: &str, expected: impl ToString) -> HeadError {
        HeadError::MissingField {
            path: self.path.to_path_buf(),
            field: self.name(field),
            expected: expected.to_string(),
        }
    }

    pub fn unsupported(&self, field: &str, found: impl ToString, reason: &str) -> HeadError {
        HeadError::unsupported(self.path, &self.name(field), found, reason)
    }

    /// A whole number above zero.
    pub fn optional_size(&self, field: &str) -> Result<Option<usize>, HeadError> {
        let Some(value) = self.value(field) else { return Ok(None) };
        match value.as_u64().and_then(|number| usize::try_from(number).ok()) {
            Some(number) if number > 0 => Ok(Some(number)),
            _ => Err(self.bad(field, value, "a whole number above 0")),
        }
    }

    pub fn size(&self, field: &str) -> Result<usize, HeadError> {
        self.optional_size(field)?.ok_or_else(|| self.missing(field, "a whole number above 0"))
    }

    pub fn optional_number(&self, field: &str) -> Result<Option<f64>, HeadError> {
        let Some(value) = self.value(field) else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| self.bad(field, value, "a number"))
    }

    pub fn flag(&self, field: &str, default: bool) -> Result<bool, HeadError> {
        let Some(value) = self.value(field) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.bad(field, value, "true or false"))
    }

    pub fn optional_text(&self, field: &str) -> Result<Option<&'a str>, HeadError> {
        let Some(value) = self.value(field) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.bad(field, value, "a string"))
    }

    pub fn optional_object(&self, field: &str) -> Result<Option<&'a Map<String, Value>>, HeadError> {
        let Some(value) = self.value(field) else { return Ok(None) };
        value.as_object().map(Some).ok_or_else(|| self.bad(field, value, "an object"))
    }

    /// Strings; absent counts as none.
    pub fn texts(&self, field: &str) -> Result<Vec<String>, HeadError> {
        let Some(value) = self.value(field) else { return Ok(Vec::new()) };
        let Some(items) = value.as_array() else { return Err(self.bad(field, value, "a list of strings")) };
        let mut texts = Vec::with_capacity(items.len());
        for item in items {
            let Some(text) = item.as_str() else { return Err(self.bad(field, value, "a list of strings")) };
            texts.push(text.to_owned());
        }
        Ok(texts)
    }

    /// Whole numbers, zero allowed.
    pub fn optional_sizes(&self, field: &str) -> Result<Option<Vec<usize>>, HeadError> {
        let Some(value) = self.value(field) else { return Ok(None) };
        let Some(items) = value.as_array() else {
            return Err(self.bad(field, value, "a list of whole numbers"));
        };
        let mut sizes = Vec::with_capacity(items.len());
        for item in items {
            match item.as_u64().and_then(|number| usize::try_from(number).ok()) {
                Some(number) => sizes.push(number),
                None => return Err(self.bad(field, value, "a list of whole numbers")),
            }
        }
        Ok(Some(sizes))
    }
}

/// Reads a file that holds one JSON object.
pub(crate) fn read_object(path: &Path) -> Result<Map<String, Value>, HeadError> {
    let bytes = fs::read(path).map_err(HeadError::io(path))?;
    serde_json::from_slice(&bytes).map_err(|source| HeadError::Json { path: path.to_path_buf(), source })
}
