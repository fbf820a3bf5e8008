"""Print the plans of the device tests as JSON, for ``attn4 compile --plans``. Needs no GPU.

PYTHONPATH=src python tests/device_plans.py > plans.json
attn4 compile --plans plans.json --out bundle
pytest tests/device --bundle bundle        # on the machine with the GPU
"""

import json

from attn4.artifact import plan_to_json
from cases import gradient_plans, required_plans

if __name__ == "__main__":
    print(json.dumps([plan_to_json(plan) for plan in (*required_plans(), *gradient_plans())]))
