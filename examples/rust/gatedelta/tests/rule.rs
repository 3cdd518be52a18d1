//! The wrapper against the recurrence in f64, pools updated in place, and refusals.
use gatedelta::{sys, Beta, Bf16, Context, Error, Gate, Inputs, Layer, States, View, ViewMut};

const T: usize = 70;
const HK: usize = 2;
const HV: usize = 4;
const K: usize = 32;
const V: usize = 16;
const STATE: usize = HV * K * V;

/// Numbers in [-0.5, 0.5).
struct Random(u64);
impl Random {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    }
    fn vec(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.next()).collect()
    }
}

/// One sequence of T tokens.
struct Data {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    g: Vec<f32>,
    beta: Vec<f32>,
}
impl Data {
    fn new() -> Self {
        let mut random = Random(1);
        Self {
            q: random.vec(T * HK * K),
            k: random.vec(T * HK * K),
            v: random.vec(T * HV * V),
            g: random.vec(T * HV).iter().map(|x| x - 0.5).collect(),
            beta: random.vec(T * HV).iter().map(|x| x + 0.5).collect(),
        }
    }
    /// Tokens [begin, end).
    fn inputs<'a>(&'a self, begin: usize, end: usize, layer: Layer<'a>) -> Inputs<'a> {
        let rows = |x: &'a [f32], heads: usize, size: usize| {
            View::new(&x[begin * heads * size..end * heads * size], &[1, end - begin, heads, size]).unwrap()
        };
        let gates =
            |x: &'a [f32]| View::strided(&x[begin * HV..end * HV], &[1, end - begin, HV], &[T * HV, HV, 1]).unwrap();
        Inputs {
            q: rows(&self.q, HK, K),
            k: rows(&self.k, HK, K),
            v: rows(&self.v, HV, V),
            g: gates(&self.g),
            beta: gates(&self.beta),
            cu_seqlens: None,
            layer,
        }
    }
    /// Outputs and final state, normalised q and k, from zero.
    fn truth(&self, tiled: bool) -> (Vec<f64>, Vec<f64>) {
        let (mut o, mut state) = (vec![0f64; T * HV * V], vec![0f64; STATE]);
        let unit = |x: &[f32]| -> Vec<f64> {
            let norm = (x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() + 1e-6).sqrt();
            x.iter().map(|&x| f64::from(x) / norm).collect()
        };
        for t in 0..T {
            for h in 0..HV {
                let key_head = if tiled { h % HK } else { h / (HV / HK) };
                let at = (t * HK + key_head) * K;
                let (q, k) = (unit(&self.q[at..at + K]), unit(&self.k[at..at + K]));
                let (alpha, beta) = (f64::from(self.g[t * HV + h]).exp(), f64::from(self.beta[t * HV + h]));
                let s = &mut state[h * K * V..(h + 1) * K * V];
                for j in 0..V {
                    let row = (t * HV + h) * V + j;
                    let read: f64 = (0..K).map(|i| alpha * s[i * V + j] * k[i]).sum();
                    for i in 0..K {
                        s[i * V + j] = alpha * s[i * V + j] + beta * k[i] * (f64::from(self.v[row]) - read);
                    }
                    o[row] = (0..K).map(|i| s[i * V + j] * q[i]).sum::<f64>() / (K as f64).sqrt();
                }
            }
        }
        (o, state)
    }
}

fn error(got: &[f32], truth: &[f64]) -> f64 {
    assert_eq!(got.len(), truth.len());
    let square = |x: f64| x * x;
    let wrong: f64 = got.iter().zip(truth).map(|(&x, &y)| square(f64::from(x) - y)).sum();
    (wrong / truth.iter().map(|&y| square(y)).sum::<f64>()).sqrt()
}

#[test]
fn forward_is_the_recurrence() {
    let data = Data::new();
    for tiled in [false, true] {
        let (truth, true_state) = data.truth(tiled);
        let layer = Layer { l2norm: true, tiled_key_heads: tiled, ..Default::default() };
        let mut results = Vec::new();
        for mut context in [Context::new(), Context::with_threads(3).unwrap()] {
            let (mut o, mut state) = (vec![f32::NAN; T * HV * V], vec![f32::NAN; STATE]);
            let last = Some(ViewMut::new(&mut state, &[1, HV, K, V]).unwrap());
            let out = ViewMut::new(&mut o, &[1, T, HV, V]).unwrap();
            context.forward(&data.inputs(0, T, layer), out, States::Apart { initial: None, last }).unwrap();
            assert!(error(&o, &truth) < 1e-5 && error(&state, &true_state) < 1e-5);
            results.push((o, state));
        }
        assert_eq!(results[0], results[1]); // bit for bit
    }
}

#[test]
fn pools_are_updated_in_place() {
    let data = Data::new();
    let (truth, true_state) = data.truth(false);
    let layer = Layer { l2norm: true, ..Default::default() };
    let mut context = Context::new();
    let mut pool = vec![7f32; 3 * STATE];
    let mut o = vec![f32::NAN; T * HV * V];
    // A prefill that starts from a null slot, that is from zero; then decode.
    for (begin, end) in std::iter::once((0, 50)).chain((50..T).map(|t| (t, t + 1))) {
        let (read, write) = ([if begin == 0 { -1 } else { 2i32 }], [2i32]);
        let states = States::Pool {
            pool: ViewMut::new(&mut pool, &[3, HV, K, V]).unwrap(),
            read: View::new(&read, &[1]).unwrap(),
            write: View::new(&write, &[1]).unwrap(),
        };
        let out = ViewMut::new(&mut o[begin * HV * V..end * HV * V], &[1, end - begin, HV, V]).unwrap();
        let inputs = data.inputs(begin, end, layer);
        if begin == 0 {
            context.forward(&inputs, out, states).unwrap();
        } else {
            context.recurrent(&inputs, out, states, None).unwrap();
        }
    }
    assert!(error(&o, &truth) < 1e-5);
    assert!(error(&pool[2 * STATE..], &true_state) < 1e-5);
    assert!(pool[..2 * STATE].iter().all(|&x| x == 7.0));
}

#[test]
fn accept_lengths_and_packs() {
    let data = Data::new();
    let layer = Layer { l2norm: true, ..Default::default() };
    let (offsets, accepted) = ([0i64, 3, 3, 8], [2i32, 0, 5]);
    let mut inputs = data.inputs(0, 8, layer);
    inputs.cu_seqlens = Some(View::new(&offsets, &[4]).unwrap());
    let (mut o, mut state) = (vec![f32::NAN; 8 * HV * V], vec![f32::NAN; 3 * STATE]);
    let last = Some(ViewMut::new(&mut state, &[3, HV, K, V]).unwrap());
    let out = ViewMut::new(&mut o, &[1, 8, HV, V]).unwrap();
    let accept = Some(View::new(&accepted, &[3]).unwrap());
    Context::new().recurrent(&inputs, out, States::Apart { initial: None, last }, accept).unwrap();
    // The first sequence's state is that of its first two tokens alone.
    let (mut two, mut expected) = (vec![0f32; 2 * HV * V], vec![0f32; STATE]);
    let last = Some(ViewMut::new(&mut expected, &[1, HV, K, V]).unwrap());
    let out = ViewMut::new(&mut two, &[1, 2, HV, V]).unwrap();
    Context::new().recurrent(&data.inputs(0, 2, layer), out, States::Apart { initial: None, last }, None).unwrap();
    assert_eq!(state[..STATE], expected);
    assert_eq!(o[..2 * HV * V], two);
    assert!(state[STATE..2 * STATE].iter().all(|&x| x == 0.0)); // an empty sequence, from zero
}

#[test]
fn raw_gates_and_bf16() {
    let bf16 = |x: &[f32]| -> Vec<Bf16> { x.iter().map(|x| Bf16((x.to_bits() >> 16) as u16)).collect() };
    let wide = |x: &[Bf16]| -> Vec<f32> { x.iter().map(|x| f32::from_bits(u32::from(x.0) << 16)).collect() };
    let data = Data::new();
    let (q, k, v) = (bf16(&data.q), bf16(&data.k), bf16(&data.v));
    // The same layer, with g and beta as they come and by the call: -exp(0) softplus(a), and a sigmoid.
    let (a, b) = (vec![0.3f32; T * HV], vec![-0.4f32; T * HV]);
    let (zeros, mut outputs) = ([0f32; HV], Vec::new());
    for raw in [true, false] {
        let (g, beta) = if raw {
            (a.clone(), b.clone())
        } else {
            (vec![-(0.3f32.exp().ln_1p()); T * HV], vec![1.0 / (1.0 + 0.4f32.exp()); T * HV])
        };
        let gate = Gate::Raw { a_log: View::new(&zeros, &[HV]).unwrap(), dt_bias: None };
        let layer = if raw {
            Layer { gate, beta: Beta::Logit, l2norm: true, ..Default::default() }
        } else {
            Layer { l2norm: true, ..Default::default() }
        };
        let inputs = Inputs {
            q: View::new(&q, &[1, T, HK, K]).unwrap(),
            k: View::new(&k, &[1, T, HK, K]).unwrap(),
            v: View::new(&v, &[1, T, HV, V]).unwrap(),
            g: View::new(&g, &[1, T, HV]).unwrap(),
            beta: View::new(&beta, &[1, T, HV]).unwrap(),
            cu_seqlens: None,
            layer,
        };
        let mut o = vec![Bf16(0x7fc0); T * HV * V];
        let out = ViewMut::new(&mut o, &[1, T, HV, V]).unwrap();
        Context::new().forward(&inputs, out, States::None).unwrap();
        outputs.push(wide(&o));
    }
    let expected: Vec<f64> = outputs[1].iter().map(|&x| x.into()).collect();
    assert!(error(&outputs[0], &expected) < 1e-2);
}

#[test]
fn refusals_say_why_and_write_nothing() {
    let data = Data::new();
    let message = |result: Result<(), Error>| {
        let error = result.unwrap_err();
        assert_eq!(error.status, sys::GD_INVALID_ARGUMENT);
        error.to_string()
    };
    let (mut context, mut o) = (Context::new(), vec![3f32; T * HV * V]);
    let mut inputs = data.inputs(0, T, Layer::default());
    inputs.k = View::new(&data.k, &[1, T, HK, K / 2]).unwrap();
    let refused = context.forward(&inputs, ViewMut::new(&mut o, &[1, T, HV, V]).unwrap(), States::None);
    assert!(message(refused).starts_with("k: shape"));

    let (mut pool, slots) = (vec![5f32; 2 * STATE], [2i32]);
    let states = States::Pool {
        pool: ViewMut::new(&mut pool, &[2, HV, K, V]).unwrap(),
        read: View::new(&slots, &[1]).unwrap(),
        write: View::new(&slots, &[1]).unwrap(),
    };
    let inputs = data.inputs(0, T, Layer::default());
    let refused = context.recurrent(&inputs, ViewMut::new(&mut o, &[1, T, HV, V]).unwrap(), states, None);
    assert!(message(refused).contains("initial_state_indices[0] is 2"));
    assert!(o.iter().all(|&x| x == 3.0) && pool.iter().all(|&x| x == 5.0));
}

#[test]
fn views_hold_what_they_say() {
    let data = vec![0f32; 24];
    assert!(View::new(&data, &[2, 3, 4]).is_ok());
    assert!(View::strided(&data, &[2, 3], &[12, 5]).is_ok());
    assert!(View::strided(&data, &[usize::MAX, 0], &[1, 1]).is_err()); // no such size in the library
    assert!(View::strided(&data, &[0, 100], &[1, 1]).is_ok()); // nothing to hold
    for (shape, strides) in [
        (&[2, 3][..], &[12, 6][..]),
        (&[25][..], &[1][..]),
        (&[3, usize::MAX / 2][..], &[1, 1][..]),
        (&[1; 6][..], &[1; 6][..]),
        (&[1, 1][..], &[1][..]),
    ] {
        assert!(View::strided(&data, shape, strides).is_err(), "{shape:?} {strides:?}");
    }
    let message = View::new(&data, &[25]).unwrap_err().to_string();
    assert_eq!(message, "24 elements do not hold shape [25] with strides [1]");
}
