"""An axolotl plugin that trains on sequences split over ranks. Put its folder on PYTHONPATH, and this into the YAML file:

```yaml
plugins:
  - axolotl_plugin.StarTrailPlugin
startrail_plan: u4/1x2
startrail_ranks: 8
```
"""

from typing import Any

import torch.distributed as dist
from axolotl.core.trainers import AxolotlTrainer
from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel
from torch.distributed.device_mesh import init_device_mesh

import startrail
from startrail.integrations.trainer import StarTrailMixin


class StarTrailArgs(BaseModel):
    startrail_plan: str = "auto"
    startrail_ranks: int | None = None


class CountingTrainer(AxolotlTrainer):
    """axolotl looks for ``num_items_in_batch`` in the arguments of the decoder. It is the model that takes it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.model_accepts_loss_kwargs = True


class StarTrailPlugin(BasePlugin):
    def get_input_args(self) -> str:
        return f"{__name__}.StarTrailArgs"

    def get_trainer_cls(self, cfg: Any) -> type[AxolotlTrainer]:
        class StarTrailTrainer(StarTrailMixin, CountingTrainer):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                config = options["model"].config.get_text_config()
                heads = dict(heads=config.num_attention_heads, kv_heads=config.num_key_value_heads)
                ranks = cfg.startrail_ranks or dist.get_world_size()
                shape = (dist.get_world_size() // ranks, ranks)
                mesh = init_device_mesh(options["args"].device.type, shape, mesh_dim_names=("data", "sequence"))
                sp = startrail.SequenceParallel(cfg.startrail_plan or "auto", mesh=mesh["sequence"], **heads)
                options["args"].average_tokens_across_devices = True  # axolotl turns it off: the loss is global here
                super().__init__(*arguments, sp=sp, **options)

        return StarTrailTrainer
