# SPDX-License-Identifier: Apache-2.0
"""What touches a running job. Nothing here imports torch until it is used."""
