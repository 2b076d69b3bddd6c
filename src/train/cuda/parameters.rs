//! All trained weights in one flat array, so that the optimizer and the gradient norm are one kernel each.

use half::bf16;

use crate::compute::cuda::{Buffer, CudaError, Device, Matrix};
use crate::head::HeadTensors;

use super::super::tensors::{named, named_mut};

/// Elements that each tensor starts at a multiple of. Sizes of q, k and v, of gate and up, and of the norms of fc are
/// such multiples for every shape that the kernels take at all with heads of 64, so that they lie side by side.
const ALIGNMENT: usize = 64;

struct Place {
    name: String,
    start: usize,
    length: usize,
}

/// Masters, bf16 copies, gradients and moments.
pub(super) struct Parameters {
    pub weights: Buffer<f32>,
    pub copies: Buffer<bf16>,
    pub gradients: Buffer<f32>,
    pub first: Buffer<f32>,
    pub second: Buffer<f32>,
    /// Elements of matrices; norms come after.
    pub matrices: usize,
    places: Vec<Place>,
}

impl Parameters {
    pub fn new(device: &Device, tensors: &HeadTensors<f32>, train_lm_head: bool) -> Result<Self, CudaError> {
        let (mut places, mut flat) = (Vec::new(), Vec::new());
        let mut matrices = 0;
        for norms in [false, true] {
            for (name, values) in named(tensors) {
                if name.contains("norm") != norms || (name == "lm_head" && !train_lm_head) {
                    continue;
                }
                places.push(Place { name, start: flat.len(), length: values.len() });
                flat.extend_from_slice(values);
                flat.resize(flat.len().next_multiple_of(ALIGNMENT), 0.0);
            }
            if !norms {
                matrices = flat.len();
            }
        }
        let parameters = Self {
            weights: device.upload(&flat)?,
            copies: device.zeros(flat.len())?,
            gradients: device.zeros(flat.len())?,
            first: device.zeros(flat.len())?,
            second: device.zeros(flat.len())?,
            matrices,
            places,
        };
        device.round_copies(&parameters.weights, &parameters.copies)?;
        Ok(parameters)
    }

    /// Where a tensor starts; its name, or the end of it after a dot.
    fn start(&self, name: &str) -> usize {
        let is_named = |whole: &str| {
            whole.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
        };
        let place = self.places.iter().find(|place| is_named(&place.name));
        place.unwrap_or_else(|| panic!("no tensor {name} among the trained ones")).start
    }

    /// The bf16 copy of a matrix, and of those that follow it where `rows` goes on.
    pub fn matrix(&self, name: &str, rows: usize, width: usize) -> Matrix<'_, bf16> {
        self.copies.matrix(self.start(name), rows, width)
    }

    /// A norm's weight.
    pub fn norm(&self, name: &str, width: usize) -> Matrix<'_, f32> {
        self.weights.matrix(self.start(name), 1, width)
    }

    pub fn gradient(&self, name: &str, rows: usize, width: usize) -> Matrix<'_, f32> {
        self.gradients.matrix(self.start(name), rows, width)
    }

    /// One of the flat arrays, written over the tensors that it holds.
    pub fn download(
        &self,
        device: &Device,
        flat: &Buffer<f32>,
        tensors: &mut HeadTensors<f32>,
    ) -> Result<(), CudaError> {
        let values = device.copy_out(flat.head(1, flat.len()))?;
        for (name, tensor) in named_mut(tensors) {
            if let Some(place) = self.places.iter().find(|place| place.name == name) {
                tensor.copy_from_slice(&values[place.start..place.start + place.length]);
            }
        }
        Ok(())
    }

    /// The way back of [`Parameters::download`].
    pub fn upload(
        &self,
        device: &Device,
        tensors: &HeadTensors<f32>,
        flat: &Buffer<f32>,
    ) -> Result<(), CudaError> {
        let mut values = vec![0.0; flat.len()];
        for (name, tensor) in named(tensors) {
            if let Some(place) = self.places.iter().find(|place| place.name == name) {
                values[place.start..place.start + place.length].copy_from_slice(tensor);
            }
        }
        device.copy_in(&values, flat.head(1, flat.len()))
    }
}
