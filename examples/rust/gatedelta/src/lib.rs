//! Safe calls of GateDelta on the CPU: the gated delta rule over slices, chunked and token by token.
//!
//! Views check that a slice holds their shape and strides; the library checks everything else, the contents of index
//! tensors included, and refuses with a message. What is not wrapped here (gradients, checkpoints, the convolution, the
//! norm, CUDA) is in [`sys`].
//!
//! ```no_run
//! use gatedelta::{Context, Inputs, Layer, States, View, ViewMut};
//! # fn main() -> Result<(), gatedelta::Error> {
//! let (q, k, v) = (vec![0.1f32; 70 * 2 * 32], vec![0.1f32; 70 * 2 * 32], vec![0.1f32; 70 * 4 * 16]);
//! let (g, beta) = (vec![-0.1f32; 70 * 4], vec![0.5f32; 70 * 4]);
//! let mut o = vec![0f32; 70 * 4 * 16];
//! let inputs = Inputs {
//!     q: View::new(&q, &[1, 70, 2, 32])?,
//!     k: View::new(&k, &[1, 70, 2, 32])?,
//!     v: View::new(&v, &[1, 70, 4, 16])?,
//!     g: View::new(&g, &[1, 70, 4])?,
//!     beta: View::new(&beta, &[1, 70, 4])?,
//!     cu_seqlens: None,
//!     layer: Layer::default(),
//! };
//! Context::new().forward(&inputs, ViewMut::new(&mut o, &[1, 70, 4, 16])?, States::None)
//! # }
//! ```
use std::{ffi::CStr, fmt, marker::PhantomData, ptr};

pub use gatedelta_sys as sys;

/// What the library, or a view, refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    /// `sys::GD_INVALID_ARGUMENT`, `sys::GD_UNSUPPORTED`, ...
    pub status: sys::gd_status,
    pub message: String,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}
impl std::error::Error for Error {}

fn invalid(message: String) -> Error {
    Error { status: sys::GD_INVALID_ARGUMENT, message }
}
fn check(status: sys::gd_status) -> Result<(), Error> {
    if status == sys::GD_OK {
        return Ok(());
    }
    // The message is this thread's, until its next failing call.
    let message = unsafe { CStr::from_ptr(sys::gd_last_error()) };
    Err(Error { status, message: message.to_string_lossy().into_owned() })
}

/// The bits of a bfloat16 number.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bf16(pub u16);

mod sealed {
    pub trait Element {
        const DTYPE: super::sys::gd_dtype;
    }
}
/// `f32`, [`Bf16`], `i32` or `i64`.
pub trait Element: sealed::Element {}
macro_rules! elements {
    ($($element:ty => $dtype:ident),*) => {$(
        impl sealed::Element for $element {
            const DTYPE: sys::gd_dtype = sys::$dtype;
        }
        impl Element for $element {}
    )*};
}
elements!(f32 => GD_F32, Bf16 => GD_BF16, i32 => GD_I32, i64 => GD_I64);

/// A tensor over `length` elements at `data`, if they hold it.
fn describe<T: Element>(
    data: *mut T,
    length: usize,
    shape: &[usize],
    strides: &[usize],
) -> Result<sys::gd_tensor, Error> {
    if shape.len() > sys::GD_MAX_RANK as usize || shape.len() != strides.len() {
        return Err(invalid(format!("shape {shape:?} with strides {strides:?}: a tensor has up to 5 of both")));
    }
    let mut tensor =
        sys::gd_tensor { data: data.cast(), dtype: T::DTYPE as i32, rank: shape.len() as i32, ..Default::default() };
    let mut last = Some(0usize); // offset of the last element
    for (i, (&size, &stride)) in shape.iter().zip(strides).enumerate() {
        let (Ok(size64), Ok(stride64)) = (i64::try_from(size), i64::try_from(stride)) else {
            return Err(invalid(format!("shape {shape:?} with strides {strides:?} is too large")));
        };
        (tensor.shape[i], tensor.stride[i]) = (size64, stride64);
        last = last.and_then(|last| size.saturating_sub(1).checked_mul(stride)?.checked_add(last));
    }
    if !shape.contains(&0) && last.map_or(true, |last| last >= length) {
        return Err(invalid(format!("{length} elements do not hold shape {shape:?} with strides {strides:?}")));
    }
    Ok(tensor)
}
fn contiguous(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1usize; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i].saturating_mul(shape[i]);
    }
    strides
}

/// A tensor that is read.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    raw: sys::gd_tensor,
    lives: PhantomData<&'a ()>,
}
impl<'a> View<'a> {
    pub fn new<T: Element>(data: &'a [T], shape: &[usize]) -> Result<Self, Error> {
        Self::strided(data, shape, &contiguous(shape))
    }
    /// Strides are in elements.
    pub fn strided<T: Element>(data: &'a [T], shape: &[usize], strides: &[usize]) -> Result<Self, Error> {
        // The library writes through outputs alone.
        let raw = describe(data.as_ptr().cast_mut(), data.len(), shape, strides)?;
        Ok(Self { raw, lives: PhantomData })
    }
}

/// A tensor that is written.
#[derive(Debug)]
pub struct ViewMut<'a> {
    raw: sys::gd_tensor,
    lives: PhantomData<&'a mut ()>,
}
impl<'a> ViewMut<'a> {
    pub fn new<T: Element>(data: &'a mut [T], shape: &[usize]) -> Result<Self, Error> {
        Self::strided(data, shape, &contiguous(shape))
    }
    /// Strides are in elements.
    pub fn strided<T: Element>(data: &'a mut [T], shape: &[usize], strides: &[usize]) -> Result<Self, Error> {
        Ok(Self { raw: describe(data.as_mut_ptr(), data.len(), shape, strides)?, lives: PhantomData })
    }
}

fn read(view: &Option<View<'_>>) -> sys::gd_tensor {
    view.map_or_else(Default::default, |view| view.raw)
}

/// What `g` holds.
#[derive(Debug, Clone, Copy, Default)]
pub enum Gate<'a> {
    /// The natural logarithm of the decay.
    #[default]
    Log,
    /// Raw `a`: the decay's logarithm is `-exp(a_log) * softplus(a + dt_bias)`, both `[Hv]`.
    Raw { a_log: View<'a>, dt_bias: Option<View<'a>> },
}
/// What `beta` holds.
#[derive(Debug, Clone, Copy, Default)]
pub enum Beta {
    #[default]
    Value,
    Logit,
    LogitDoubled,
}
/// How the inputs are meant. The default is the header's: states `[K, V]`, key heads grouped, scale `K^-1/2`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Layer<'a> {
    pub gate: Gate<'a>,
    pub beta: Beta,
    pub scale: Option<f32>,
    /// q and k are normalised by the call.
    pub l2norm: bool,
    /// States are `[V, K]`.
    pub value_first: bool,
    /// Value head h uses key head `h % Hk`, as in ggml.
    pub tiled_key_heads: bool,
}

/// `q, k [B, T, Hk, K]`, `v [B, T, Hv, V]`, `g, beta [B, T, Hv]`; packed sequences by `cu_seqlens [N + 1]`, with B = 1.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    pub q: View<'a>,
    pub k: View<'a>,
    pub v: View<'a>,
    pub g: View<'a>,
    pub beta: View<'a>,
    pub cu_seqlens: Option<View<'a>>,
    pub layer: Layer<'a>,
}
impl Inputs<'_> {
    fn describe(&self) -> sys::gd_inputs {
        let layer = &self.layer;
        let (gate, a_log, dt_bias) = match &layer.gate {
            Gate::Log => (sys::GD_GATE_LOG, Default::default(), Default::default()),
            Gate::Raw { a_log, dt_bias } => (sys::GD_GATE_RAW, a_log.raw, read(dt_bias)),
        };
        let beta_kind = match layer.beta {
            Beta::Value => sys::GD_BETA_VALUE,
            Beta::Logit => sys::GD_BETA_LOGIT,
            Beta::LogitDoubled => sys::GD_BETA_LOGIT_DOUBLED,
        };
        sys::gd_inputs {
            q: self.q.raw,
            k: self.k.raw,
            v: self.v.raw,
            g: self.g.raw,
            beta: self.beta.raw,
            A_log: a_log,
            dt_bias,
            cu_seqlens: read(&self.cu_seqlens),
            gate: gate as i32,
            beta_kind: beta_kind as i32,
            state_layout: if layer.value_first { sys::GD_STATE_VK } else { sys::GD_STATE_KV } as i32,
            key_head_order: if layer.tiled_key_heads { sys::GD_KEY_HEADS_TILED } else { sys::GD_KEY_HEADS_GROUPED }
                as i32,
            l2norm: layer.l2norm.into(),
            has_scale: layer.scale.is_some().into(),
            scale: layer.scale.unwrap_or(0.0),
            ..Default::default()
        }
    }
}

/// Where sequences start from, and where their final states go. A state tensor is `[N, Hv, K, V]`, or `[N, Hv, V, K]`.
#[derive(Debug)]
pub enum States<'a> {
    /// From zero, to nowhere.
    None,
    /// One entry for each sequence.
    Apart { initial: Option<View<'a>>, last: Option<ViewMut<'a>> },
    /// A pool `[slots, Hv, ...]`, updated in place: the slots read and written, `[N]`. A negative slot is a null slot:
    /// read, it is zeros; written, nothing is stored; with both the sequence is skipped.
    Pool { pool: ViewMut<'a>, read: View<'a>, write: View<'a> },
}
impl States<'_> {
    /// Sets the two inputs; returns final_state and final_state_indices.
    fn describe(&self, inputs: &mut sys::gd_inputs) -> (sys::gd_tensor, sys::gd_tensor) {
        match self {
            States::None => Default::default(),
            States::Apart { initial, last } => {
                inputs.initial_state = read(initial);
                (last.as_ref().map_or_else(Default::default, |last| last.raw), Default::default())
            }
            States::Pool { pool, read, write } => {
                inputs.initial_state = pool.raw;
                inputs.initial_state_indices = read.raw;
                (pool.raw, write.raw)
            }
        }
    }
}

#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([u8; 64]);

/// What calls share: a workspace that grows to what they need, and threads.
pub struct Context {
    workspace: Vec<Line>,
    threads: *mut sys::gd_thread_pool, // null: the calling thread does all the work
}
// The pool may be used from any thread, one call at a time, which &mut self sees to.
unsafe impl Send for Context {}

impl Default for Context {
    fn default() -> Self {
        Self::new()
    }
}
impl Drop for Context {
    fn drop(&mut self) {
        if !self.threads.is_null() {
            unsafe { sys::gd_thread_pool_destroy(self.threads) }
        }
    }
}

impl Context {
    pub fn new() -> Self {
        Self { workspace: Vec::new(), threads: ptr::null_mut() }
    }
    /// 0: a thread for each CPU. Results do not depend on how many there are.
    pub fn with_threads(count: i32) -> Result<Self, Error> {
        let mut context = Self::new();
        check(unsafe { sys::gd_thread_pool_create(count, &mut context.threads) })?;
        Ok(context)
    }

    /// Whole sequences: training and prefill. `out [B, T, Hv, V]`.
    pub fn forward(&mut self, inputs: &Inputs<'_>, out: ViewMut<'_>, states: States<'_>) -> Result<(), Error> {
        let mut args = sys::gd_forward_args { in_: inputs.describe(), out: out.raw, ..sys::gd_forward_args::new() };
        (args.final_state, args.final_state_indices) = states.describe(&mut args.in_);
        args.exec = self.exec();
        let mut bytes = 0;
        check(unsafe { sys::gd_forward_workspace(&args, &mut bytes) })?;
        self.give_workspace(&mut args.exec, bytes);
        check(unsafe { sys::gd_forward(&args) })
    }

    /// Token by token: decode and draft verification. With `accept_lengths [N]` a final state is the one after so many
    /// tokens of its sequence.
    pub fn recurrent(
        &mut self,
        inputs: &Inputs<'_>,
        out: ViewMut<'_>,
        states: States<'_>,
        accept_lengths: Option<View<'_>>,
    ) -> Result<(), Error> {
        let mut args = sys::gd_recurrent_args {
            in_: inputs.describe(),
            out: out.raw,
            accept_lengths: read(&accept_lengths),
            ..sys::gd_recurrent_args::new()
        };
        (args.final_state, args.final_state_indices) = states.describe(&mut args.in_);
        args.exec = self.exec();
        let mut bytes = 0;
        check(unsafe { sys::gd_recurrent_workspace(&args, &mut bytes) })?;
        self.give_workspace(&mut args.exec, bytes);
        check(unsafe { sys::gd_recurrent(&args) })
    }

    fn exec(&self) -> sys::gd_exec {
        let mut exec = sys::gd_exec::default();
        if !self.threads.is_null() {
            exec.num_threads = unsafe { sys::gd_thread_pool_size(self.threads) };
            exec.parallel_for = Some(sys::gd_thread_pool_parallel_for);
            exec.parallel_for_context = self.threads.cast();
        }
        exec
    }
    fn give_workspace(&mut self, exec: &mut sys::gd_exec, bytes: usize) {
        let lines = bytes.div_ceil(64);
        if self.workspace.len() < lines {
            self.workspace.resize(lines, Line([0; 64]));
        }
        exec.workspace = self.workspace.as_mut_ptr().cast();
        exec.workspace_bytes = self.workspace.len() * 64;
    }
}
