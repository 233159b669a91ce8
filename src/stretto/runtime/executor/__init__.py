# SPDX-License-Identifier: Apache-2.0
"""The executor: runs lowered programs on this machine's memory and network."""
