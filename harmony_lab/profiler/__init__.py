"""From a model to layers and what they cost: decompose, measure, estimate."""
