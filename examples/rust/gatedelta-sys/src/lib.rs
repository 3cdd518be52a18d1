//! The C ABI of GateDelta, unchanged: `include/gatedelta/gatedelta.h` says what everything means.
//!
//! A default struct is all zeros; `struct_size` must be set, which the functions here do, as the header's `*_INIT`
//! macros do in C.
#![no_std]
#![allow(non_camel_case_types, non_snake_case)]

include!("bindings.rs");

macro_rules! sized {
    ($($args:ident),*) => {$(
        impl $args {
            pub fn new() -> Self {
                Self { struct_size: core::mem::size_of::<Self>(), ..Default::default() }
            }
        }
    )*};
}
sized!(
    gd_forward_args,
    gd_backward_args,
    gd_recurrent_args,
    gd_conv1d_args,
    gd_conv1d_backward_args,
    gd_gated_norm_args,
    gd_gated_norm_backward_args,
    gd_layer_step_args,
    gd_info
);
