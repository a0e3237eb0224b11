import os

import torch
import torch._dynamo  # noqa: F401, the first call of an op imports it: better here, once, than on every forked rank

# what auto chooses should not depend on what a busy machine measures
os.environ.setdefault("STARTRAIL_CLUSTER", "lab")

torch.set_num_threads(1)  # ranks are forked from this process, which must not have used OpenMP threads
