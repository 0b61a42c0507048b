"""The codes of op kinds, streams and tensor kinds (``program``), as compiled functions pass them to each other.

They are int64: with plain ints each value would compile the function anew.
"""

import numpy as np

from harmony_lab.machine import HOST
from harmony_lab.program import OP_CODES, STREAM_CODES, TENSOR_CODES, OpKind, Stream, TensorKind

__all__ = [
    "ACTIVATION",
    "ACTIVATION_GRADIENT",
    "ALL_REDUCE",
    "BACKWARD",
    "BUFFER",
    "FORWARD",
    "FREE",
    "GRADIENT",
    "HOST_DEVICE",
    "INPUT",
    "NONE",
    "ON_COMPUTE",
    "ON_HOST",
    "ON_MEMORY",
    "ON_PEER_IN",
    "ON_PEER_OUT",
    "ON_SWAP_IN",
    "ON_SWAP_OUT",
    "ON_VALUES_IN",
    "ON_VALUES_OUT",
    "OPTIMIZER",
    "RECOMPUTE",
    "RECV",
    "SAVED",
    "SEND",
    "SWAP_IN",
    "SWAP_OUT",
    "UPDATE",
    "WEIGHT",
    "WORKSPACE",
    "ZERO",
]

FORWARD, RECOMPUTE, BACKWARD, UPDATE, SWAP_IN, SWAP_OUT, SEND, RECV, ALL_REDUCE, FREE = (
    np.int64(OP_CODES[kind]) for kind in OpKind
)
ON_COMPUTE, ON_SWAP_IN, ON_SWAP_OUT, ON_VALUES_IN, ON_VALUES_OUT, ON_PEER_IN, ON_PEER_OUT, ON_HOST, ON_MEMORY = (
    np.int64(STREAM_CODES[stream]) for stream in Stream
)
WEIGHT, BUFFER, GRADIENT, INPUT, ACTIVATION, ACTIVATION_GRADIENT, SAVED, WORKSPACE, OPTIMIZER = (
    np.int64(TENSOR_CODES[kind]) for kind in TensorKind
)
HOST_DEVICE, NONE, ZERO = np.int64(HOST), np.int64(-1), np.int64(0)
