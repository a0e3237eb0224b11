import os

import torch
import torch._dynamo

# what auto chooses should not depend on what a busy machine measures
os.environ.setdefault("STARTRAIL_CLUSTER", "lab")

torch.set_num_threads(1)  # ranks are forked from this process, which must not have used OpenMP threads
