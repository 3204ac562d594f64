"""Rows of logits (V,) that a choice of tokens may go wrong on: ties, tokens that are gone, extremes."""

import numpy as np


def random_row(vocab, seed, spread=3.0):
    return (np.random.default_rng(seed).standard_normal(vocab) * spread).astype(np.float32)


def tied_row(vocab, seed):
    return np.random.default_rng(seed).integers(-3, 4, vocab).astype(np.float32)


def masked_row(vocab, seed):
    row = random_row(vocab, seed)
    row[np.random.default_rng(seed).random(vocab) < 0.7] = -np.inf
    row[seed % vocab] = 1.0
    return row


def one_hot_row(vocab, seed):
    row = np.full(vocab, -np.inf, np.float32)
    row[seed % vocab] = -3.0
    return row


def extreme_row(vocab, seed):
    return np.random.default_rng(seed).choice(np.float32([-1e4, 1e4, 0, -0.0, 9999.5]), vocab)


def uniform_row(vocab, seed):
    return np.full(vocab, seed - 2.5, np.float32)


ROWS = [random_row, tied_row, masked_row, one_hot_row, extreme_row, uniform_row]
