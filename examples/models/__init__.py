# SPDX-License-Identifier: Apache-2.0
"""Small models that train on CPU ranks: a DLRM and a GPT."""
