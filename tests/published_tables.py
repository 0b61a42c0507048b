"""Made-up published tables: a small model whose layers all differ."""

import random
from typing import Any

FORWARD_SIZES = (1, 3, 5, 9)
BACKWARD_SIZES = (1, 3, 5)


def tables(num_layers: int = 6, seed: int = 0) -> dict[str, Any]:
    """As ``json.load`` gives them.  Memory is linear in the microbatch size, seconds are not."""
    rng = random.Random(seed)
    parameters = [4 * rng.randint(1, 50_000) for _ in range(num_layers)]
    buffers = [4 * rng.randint(0, 500) for _ in range(num_layers)]
    inputs = [4 * rng.randint(1, 2_000) for _ in range(num_layers)] + [4]
    inside = [rng.randint(0, 20_000) for _ in range(num_layers)]

    def forward_bytes(size: int, layer: int) -> int:
        return parameters[layer] + buffers[layer] + size * (inputs[layer] + inputs[layer + 1] + inside[layer])

    def backward_bytes(size: int, layer: int) -> int:
        return forward_bytes(size, layer) + parameters[layer] + size * (3 * inputs[layer] + 2 * inputs[layer + 1])

    forward_s = {size: [rng.uniform(1, 2) * size for _ in range(num_layers)] for size in FORWARD_SIZES}
    backward_s = {size: [forward_s[size][i] * rng.uniform(2, 4) for i in range(num_layers)] for size in BACKWARD_SIZES}
    layers = range(num_layers)
    return {
        "model": "made up",
        "device": "a card",
        "num_layers": num_layers,
        "microbatch_sizes": {"forward": list(FORWARD_SIZES), "backward": list(BACKWARD_SIZES)},
        "forward_time_s": {str(size): forward_s[size] for size in FORWARD_SIZES},
        "backward_time_s": {str(size): backward_s[size] for size in BACKWARD_SIZES},
        "forward_memory_bytes": {str(u): [forward_bytes(u, i) for i in layers] for u in FORWARD_SIZES},
        "backward_memory_bytes": {str(u): [backward_bytes(u, i) for i in layers] for u in BACKWARD_SIZES},
        "input_bytes": {str(u): [u * inputs[i] for i in layers] for u in FORWARD_SIZES},
        "parameter_bytes": parameters,
        "buffer_bytes": buffers,
        "optimizer_state_bytes": [2 * num_bytes for num_bytes in parameters],
        "cpu_update_time_s": [1e-9 * num_bytes for num_bytes in parameters],
    }
