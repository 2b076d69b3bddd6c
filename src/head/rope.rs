//! Where the rotary embedding stands in a config.json; the same for heads and verifiers.

use serde_json::Value;

use super::Rope;
use super::error::HeadError;
use super::fields::Fields;

/// Fields of `rope_parameters` that say nothing about scaling.
const NOT_SCALING: [&str; 2] = ["rope_theta", "partial_rotary_factor"];

/// Reads `rope_theta` (at the top or in `rope_parameters`) and the scaling object (`rope_scaling` or
/// `rope_parameters`). The type "default" is no scaling. The default theta is transformers' 10000.
pub(crate) fn read_rope(fields: Fields<'_>) -> Result<Rope, HeadError> {
    let mut parameters = fields.optional_object("rope_parameters")?;
    // One object per kind of layer: a head attends to everything, so it takes the full-attention one.
    if let Some(Value::Object(full)) = parameters.and_then(|object| object.get("full_attention")) {
        parameters = Some(full);
    }
    let mut theta = fields.optional_number("rope_theta")?;
    let mut scaling = fields.optional_object("rope_scaling")?.cloned();
    if let Some(object) = parameters {
        let inner = Fields { path: fields.path, prefix: "rope_parameters.", object };
        theta = theta.or(inner.optional_number("rope_theta")?);
        if scaling.is_none() {
            let mut copy = object.clone();
            copy.retain(|name, _| !NOT_SCALING.contains(&name.as_str()));
            scaling = Some(copy);
        }
    }
    let scaling = scaling.filter(|object| {
        let kind = object.get("rope_type").or_else(|| object.get("type")).and_then(Value::as_str);
        !object.is_empty() && kind != Some("default")
    });
    let theta = theta.unwrap_or(10_000.0);
    if !(theta.is_finite() && theta > 0.0) {
        return Err(HeadError::bad_field(fields.path, &fields.name("rope_theta"), theta, "a number above 0"));
    }
    Ok(Rope { theta, scaling: scaling.map(Value::Object) })
}
