#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""`tensorlane health` of many workers on one machine. This test runs by itself: workers that get no processor for a
second are told as ones that do not answer, and rightly so."""
import cli_support
from cli_health_sound_test import SoundCase


class Many(SoundCase):
    def test_sixty_four(self):
        """They share the processors of one machine, and all of them try all others at the same time. Where that takes
        too long, a later round tries the rest; none raises an alarm."""
        path = self.file("many", {"ps": self.addresses(16 if cli_support.SANITIZE else 64)}, protocol="grpc")
        self.start_all(path)

        def is_complete():
            rows = self.find_sound(path)
            return all(probe["reason"] == "" for row in rows for probe in row["probes"])
        cli_support.wait_until(is_complete, "a round in which all pairs are tried")


if __name__ == "__main__":
    cli_support.main()
