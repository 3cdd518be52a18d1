"""A stand-in for SGLang: the few names that gatedelta.sglang touches, with the shapes they have in SGLang 0.5.23."""
