from abc import ABC, abstractmethod


class LinearAttnKernelBase(ABC):
    uses_state_checkpoints = False
    supports_strided_target_verify_qkv = False
    supports_track_state_snapshot = False

    @abstractmethod
    def decode(self, q, k, v, a, b, **kwargs): ...

    @abstractmethod
    def extend(self, q, k, v, g, beta, **kwargs): ...
