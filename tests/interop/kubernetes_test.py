#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""deploy/kubernetes is valid for the published schemas of Kubernetes, in which no unknown field is allowed."""
import os
import pathlib
import sys
import unittest

try:
    import kubernetes_validate
    import yaml
except ImportError as missing:
    print(f"a package of PyPI is not there: {missing}")
    sys.exit(77)

FOLDER = pathlib.Path(os.environ["TENSORLANE_SOURCE"], "deploy/kubernetes")
VERSIONS = ["1.30", "1.34", "1.37"]


class Manifests(unittest.TestCase):
    def test_schemas(self):
        for path in sorted(FOLDER.glob("*.yaml")):
            documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
            self.assertGreater(len(documents), 0)
            for version in VERSIONS:
                for document in documents:
                    with self.subTest(path.name, kind=document["kind"], version=version):
                        kubernetes_validate.validate(document, version, strict=True)

    def test_unknown_fields_are_refused(self):
        document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "dato": {}}
        with self.assertRaises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(document, VERSIONS[0], strict=True)


if __name__ == "__main__":
    unittest.main(verbosity=2)
