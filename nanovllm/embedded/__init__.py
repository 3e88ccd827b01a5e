"""The embedded model: a trained Qwen3 checkpoint small enough to ship inside the package.

It adds two whole numbers from 0 to 99, so anyone can check its greedy answers at a glance. This folder is
an ordinary checkpoint folder; `questions.py` holds the data it was trained on, `train.py` made the files.
"""
