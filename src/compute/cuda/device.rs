//! A GPU with its stream, its compiled kernels and its chosen products.

#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cudarc::cublaslt::result::CublasError;
use cudarc::driver::{
    CudaContext, CudaEvent, CudaFunction, CudaModule, CudaStream, DriverError, LaunchConfig, PushKernelArg,
    sys,
};
use cudarc::nvrtc::Ptx;

use super::compile::{Shape, compile};
use super::product::Products;

/// What can go wrong on the GPU.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    #[error(
        "{0} cannot be opened; install the NVIDIA driver and CUDA 13 (libcublasLt, libnvrtc), or set LD_LIBRARY_PATH"
    )]
    Missing(&'static str),
    #[error("no GPU number {ordinal}: the driver shows {count}; see nvidia-smi and CUDA_VISIBLE_DEVICES")]
    NoGpu { ordinal: usize, count: usize },
    #[error("the head's shape on the GPU: {0}")]
    Shape(String),
    #[error("{bytes} bytes of GPU memory: {source}; train with fewer tokens in a batch or a shorter unroll")]
    Memory { bytes: usize, source: DriverError },
    #[error("the GPU: {0:?}")]
    Driver(#[from] DriverError),
    #[error("a matrix product on the GPU: {0:?}")]
    Product(#[from] CublasError),
    #[error("the kernels do not compile for {target}: {log}")]
    Compile { target: String, log: String },
}

/// Whether this machine has the driver, NVRTC and cublasLt, and a GPU.
pub fn is_present() -> bool {
    check(0).is_ok()
}

/// An error that says what is missing for GPU number `ordinal` to be opened.
pub fn check(ordinal: usize) -> Result<(), CudaError> {
    if let Some(library) = missing_library() {
        return Err(CudaError::Missing(library));
    }
    // A driver without a GPU refuses to count.
    let count = CudaContext::device_count().map_or(0, |count| usize::try_from(count).unwrap_or(0));
    if ordinal >= count {
        return Err(CudaError::NoGpu { ordinal, count });
    }
    Ok(())
}

fn missing_library() -> Option<&'static str> {
    // SAFETY: these open the libraries, whose initialisers are NVIDIA's own.
    unsafe {
        if !sys::is_culib_present() {
            return Some("the NVIDIA driver (libcuda)");
        }
        if !cudarc::cublaslt::sys::is_culib_present() {
            return Some("libcublasLt");
        }
    }
    (!super::compile::compiler_is_present()).then_some("libnvrtc")
}

/// Time of the operations of one name.
#[derive(Clone, Debug, PartialEq)]
pub struct Lap {
    pub name: String,
    pub calls: usize,
    pub milliseconds: f64,
}

/// The GPU, with the kernels of one head's shape.
pub struct Device {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    module: Arc<CudaModule>,
    functions: RefCell<BTreeMap<&'static str, CudaFunction>>,
    pub(super) products: Products,
    shape: Shape,
    multiprocessors: usize,
    allocated: Arc<AtomicUsize>,
    operations: Cell<f64>,
    laps: RefCell<Option<Vec<(String, CudaEvent)>>>,
}

/// One argument of a kernel.
pub(super) enum Argument {
    Address(u64),
    Int(i32),
    Long(i64),
    Float(f32),
}

impl Device {
    /// Opens GPU number `ordinal` and compiles the kernels for a head's shape.
    pub fn open(ordinal: usize, shape: Shape) -> Result<Self, CudaError> {
        check(ordinal)?;
        shape.check()?;
        let context = CudaContext::new(ordinal)?;
        // SAFETY: all work goes to one stream, so that its order is all the synchronisation that is needed.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream()?;
        let (major, minor) = context.compute_capability()?;
        // sm_90a has Hopper's own instructions; other chips need the plain name.
        let suffix = if (major, minor) == (9, 0) { "a" } else { "" };
        let image = compile(&shape, &format!("sm_{major}{minor}{suffix}"))?;
        let module = context.load_module(Ptx::from_binary(image))?;
        let count = context.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let products = Products::new(&stream)?;
        Ok(Self {
            context,
            stream,
            module,
            functions: RefCell::default(),
            products,
            shape,
            multiprocessors: usize::try_from(count).unwrap_or(1),
            allocated: Arc::new(AtomicUsize::new(super::product::WORKSPACE)),
            operations: Cell::new(0.0),
            laps: RefCell::default(),
        })
    }

    /// The GPU's name.
    pub fn name(&self) -> Result<String, CudaError> {
        Ok(self.context.name()?)
    }

    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Bytes of the GPU that are in use, by all programs.
    pub fn bytes_in_use(&self) -> Result<usize, CudaError> {
        let (free, total) = self.context.mem_get_info()?;
        Ok(total - free)
    }

    /// Bytes of all buffers.
    pub fn bytes_allocated(&self) -> usize {
        self.allocated.load(Ordering::Relaxed)
    }

    pub(super) fn allocated(&self) -> &Arc<AtomicUsize> {
        &self.allocated
    }

    /// Floating-point operations of all products so far.
    pub fn product_operations(&self) -> f64 {
        self.operations.get()
    }

    pub(super) fn count_operations(&self, count: f64) {
        self.operations.set(self.operations.get() + count);
    }

    /// Waits for all work.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        Ok(self.stream.synchronize()?)
    }

    /// A point in the stream; [`CudaEvent::elapsed_ms`] between two gives the time of the work between them.
    pub fn event(&self) -> Result<CudaEvent, CudaError> {
        Ok(self.stream.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT))?)
    }

    pub(super) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    pub(super) fn multiprocessors(&self) -> usize {
        self.multiprocessors
    }

    /// From here on, every operation is timed by its name.
    pub fn start_laps(&self) -> Result<(), CudaError> {
        let start = self.event()?;
        *self.laps.borrow_mut() = Some(vec![("start".to_owned(), start)]);
        Ok(())
    }

    /// Times of all operations since [`Device::start_laps`], the longest first.
    pub fn finish_laps(&self) -> Result<Vec<Lap>, CudaError> {
        let events = self.laps.borrow_mut().take().unwrap_or_default();
        let mut sums: BTreeMap<&str, Lap> = BTreeMap::new();
        for pair in events.windows(2) {
            let name = pair[1].0.as_str();
            let milliseconds = f64::from(pair[0].1.elapsed_ms(&pair[1].1)?);
            let lap = sums.entry(name).or_insert_with(|| Lap {
                name: name.to_owned(),
                calls: 0,
                milliseconds: 0.0,
            });
            lap.calls += 1;
            lap.milliseconds += milliseconds;
        }
        let mut list: Vec<Lap> = sums.into_values().collect();
        list.sort_by(|a, b| b.milliseconds.total_cmp(&a.milliseconds));
        Ok(list)
    }

    pub(super) fn lap(&self, name: impl FnOnce() -> String) -> Result<(), CudaError> {
        if let Some(laps) = self.laps.borrow_mut().as_mut() {
            laps.push((name(), self.event()?));
        }
        Ok(())
    }

    /// Launches a kernel of the module.
    ///
    /// The caller, an operation of this room, answers for the arguments: types and order as in the kernel's text, every
    /// address inside a live buffer for all that the kernel reads and writes there.
    pub(super) fn launch(
        &self,
        name: &'static str,
        (grid, block, shared): ([usize; 3], usize, usize),
        arguments: &[Argument],
    ) -> Result<(), CudaError> {
        if grid.contains(&0) {
            return Ok(());
        }
        let mut functions = self.functions.borrow_mut();
        if !functions.contains_key(name) {
            let function = self.module.load_function(name)?;
            if shared > 48 * 1024 {
                function.set_attribute(
                    sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    shared as i32,
                )?;
            }
            functions.insert(name, function);
        }
        let mut builder = self.stream.launch_builder(&functions[name]);
        for argument in arguments {
            match argument {
                Argument::Address(value) => builder.arg(value),
                Argument::Int(value) => builder.arg(value),
                Argument::Long(value) => builder.arg(value),
                Argument::Float(value) => builder.arg(value),
            };
        }
        let config = LaunchConfig {
            grid_dim: (grid[0] as u32, grid[1] as u32, grid[2] as u32),
            block_dim: (block as u32, 1, 1),
            shared_mem_bytes: shared as u32,
        };
        // SAFETY: as promised by the operation that calls.
        unsafe { builder.launch(config) }?;
        drop(functions);
        self.lap(|| name.to_owned())
    }
}
