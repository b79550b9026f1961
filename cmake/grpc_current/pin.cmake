# SPDX-License-Identifier: Apache-2.0
# The source distribution of grpcio on PyPI that ./dev build --grpc current takes gRPC's core from.
set(GRPC_CURRENT_VERSION 1.85.3)
set(GRPC_CURRENT_URL https://files.pythonhosted.org/packages/1e/48/8e14d92cca434b448c7018654da80f574aea3663f7d1f87ed044455c45c6/grpcio-1.85.3.tar.gz)
set(GRPC_CURRENT_SHA256 8e18f15d1b09b8771edbf59d634b26cbe4903bc2577cb667264934a6655eb8b4)
