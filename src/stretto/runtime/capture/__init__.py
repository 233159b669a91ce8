# SPDX-License-Identifier: Apache-2.0
"""Recording one training step of a running job as a Workload."""
