# SPDX-License-Identifier: Apache-2.0
"""Trains one model on ml-100k and prints its quality on the test part.

python examples/quality/train.py DeepFM --data ml-100k
tfdist-run -n 4 examples/quality/train.py DeepFM --data ml-100k
python examples/quality/train.py DeepFM --stock --data ml-100k

The files are those that the package `recbole` ships: `ml-100k.inter`, `.user`
and `.item`. Without --data, those of an installed `recbole` are read. --stock
trains the same model in one process of Keras, without tfdist_ext.
`python -m benchmarks.quality` runs all models and compares.
"""

import argparse
import json
import pathlib
import sys

# For the modules that the examples share.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import tensorflow as tf
from command_line import make_parser

from quality import clicks
from quality import files
from quality import pairs
from quality import scores
from quality import sequences
from quality.parts import Parts

TASKS = (clicks, pairs, sequences, scores)
MODELS = {name: task for task in TASKS for name in task.MODELS}


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("model", choices=MODELS, help="what to train")
    add("--data", metavar="DIR", help="directory with ml-100k.inter")
    add("--seed", type=int, default=0, help="of split, order and weights")
    add("--folds", type=int, help="of SVD and SVD++; all 5 by default")
    add("--stock", action="store_true", help="Keras only, in one process")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    folder = files.find(arguments.data)
    if folder is None:
        sys.exit("Give --data, or install recbole: pip install recbole==1.2.1")
    parts = Parts(arguments.stock)
    tf.keras.utils.set_random_seed(arguments.seed)
    task = MODELS[arguments.model]
    data, name = files.read(folder), arguments.model
    options = {} if arguments.folds is None else {"folds": arguments.folds}
    found = task.run(parts, data, name, arguments.seed, **options)
    if parts.is_first:
        print(json.dumps({"model": name, **found}))


if __name__ == "__main__":
    main()
