import torch._dynamo  # noqa: F401, the first call of an op imports it: better here, once, than on every forked rank
