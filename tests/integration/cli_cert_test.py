#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""tensorlane cert: an authority, certificates that OpenSSL and gRPC accept, what is refused, and what `show` says."""
import concurrent.futures
import json
import os
import signal
import subprocess

import grpc

import cli_support
from cli_support import PATIENCE, environment, run_in_terminal


def openssl(*arguments, **options):
    return subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, check=False,
                          timeout=PATIENCE, **options)


class Cert(cli_support.Case):
    def setUp(self):
        super().setUp()
        self.certs = self.folder / "certs"
        self.assert_run(0, "cert", "init", "-o", self.certs)

    def cert(self, code, *arguments, **options):
        return self.assert_run(code, "cert", *arguments, "-o", self.certs, **options)

    def refuse(self, code, pattern, *arguments):
        return self.assert_error(code, pattern, "cert", *arguments, "-o", self.certs)

    def names(self):
        return sorted(path.name for path in self.certs.iterdir())

    def show(self, name):
        return json.loads(self.assert_run(0, "cert", "show", self.certs / name, "--json").stdout)

    def assert_verifies(self, name, *options):
        result = openssl("verify", "-x509_strict", "-CAfile", self.certs / "ca.pem", *options, self.certs / name)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)


class Issuing(Cert):
    def test_an_authority(self):
        self.assertEqual(self.names(), ["ca.crl", "ca.key", "ca.pem"])
        self.assert_verifies("ca.pem")
        text = openssl("x509", "-in", self.certs / "ca.pem", "-noout", "-text").stdout
        for part in ("CA:TRUE, pathlen:0", "Certificate Sign, CRL Sign", "NIST CURVE: P-256",
                     "URI:spiffe://example.org"):
            self.assertIn(part, text)
        self.assertEqual(os.stat(self.certs).st_mode & 0o777, 0o700)

    def test_a_certificate_for_each_task_and_one_for_tools(self):
        cluster = {"ps": ["127.0.0.1:4000", "ps-1.example.org:4000"], "worker": {"7": "[fd00::7]:4000"}}
        path = self.write_json({"cluster": cluster})
        lines = self.cert(0, "issue", "--config", path).stdout.splitlines()
        files = {"ps-0": "/job:ps/task:0", "ps-1": "/job:ps/task:1", "worker-7": "/job:worker/task:7",
                 "client": "spiffe://example.org/client/client"}
        self.assertEqual(lines, [f"{self.certs}/{file}.pem: {name}" for file, name in files.items()])
        hosts = {"ps-0": ["IP Address:127.0.0.1", "DNS:localhost", "IP Address:0:0:0:0:0:0:0:1"],
                 "ps-1": ["DNS:ps-1.example.org"], "worker-7": ["IP Address:FD00:0:0:0:0:0:0:7"], "client": []}
        for file, name in files.items():
            self.assert_verifies(f"{file}.pem", "-crl_check", "-CRLfile", self.certs / "ca.crl")
            self.assertEqual(self.show(f"{file}.pem")["name"], name)
            self.assertEqual(self.show(f"{file}.pem")["names"][1:], hosts[file])
        for path in self.certs.iterdir():
            self.assertEqual(os.stat(path).st_mode & 0o7777, 0o600, path)
        self.assertEqual(len(self.names()), 3 + 2 * len(files))

    def test_names_in_no_file(self):
        self.cert(0, "issue", "--name", "ps:3", "-n", "/job:a-b.c/task:0", "--name", "ann", "--name",
                  "spiffe://example.org/ns/prod/sa/web", "--host", "a.example.org", "--host", "10.0.0.1", "--days", 3)
        self.assertEqual(self.show("ps-3.pem")["name"], "/job:ps/task:3")
        self.assertEqual(self.show("a-b.c-0.pem")["name"], "/job:a-b.c/task:0")
        shown = self.show("ann.pem")
        self.assertEqual((shown["kind"], shown["name"]), ("client", "spiffe://example.org/client/ann"))
        self.assertEqual(shown["names"][1:], ["DNS:a.example.org", "IP Address:10.0.0.1"])
        self.assertEqual(shown["days_left"], 3)
        self.assertEqual(self.show("ns-prod-sa-web.pem")["name"], "spiffe://example.org/ns/prod/sa/web")

    def test_one_task_of_a_cluster(self):
        path = self.write_json({"cluster": {"ps": ["127.0.0.1:4000", "b.example.org:4000"]}})
        self.cert(0, "issue", "--config", path, "--name", "ps:1")
        self.assertEqual(self.show("ps-1.pem")["names"][1:], ["DNS:b.example.org"])
        self.assertNotIn("ps-0.pem", self.names())
        self.refuse(1, "ps:2|tasks 0 to 1", "issue", "--config", path, "--name", "ps:2")

    def test_the_cluster_of_tensorflow(self):
        text = json.dumps({"cluster": {"ps": ["127.0.0.1:4000"]}, "task": {"type": "ps", "index": 0}})
        self.cert(0, "issue", env=environment(TF_CONFIG=text))
        self.assertIn("ps-0.pem", self.names())
        self.cert(0, "issue", "--name", "other:1", env=environment(TF_CONFIG=text))
        self.assertIn("other-1.pem", self.names())

    def test_another_trust_domain(self):
        self.assert_run(0, "cert", "init", "-o", self.folder / "b", "--trust-domain", "prod.train")
        self.assert_run(0, "cert", "issue", "-o", self.folder / "b", "--name", "ps:0")
        shown = json.loads(self.assert_run(0, "cert", "show", self.folder / "b/ps-0.pem", "--json").stdout)
        self.assertEqual(shown["trust_domain"], "prod.train")
        self.assert_error(1, "is not in the trust domain of the authority; begin the name with spiffe://prod.train/",
                          "cert", "issue", "-o", self.folder / "b", "--name", "spiffe://example.org/client/ann")
        # Two authorities have the same name, and yet nothing of one is accepted as the other's.
        result = openssl("verify", "-CAfile", self.certs / "ca.pem", self.folder / "b/ps-0.pem")
        self.assertNotEqual(result.returncode, 0)

    def test_standard_clients_accept_the_server(self):
        self.cert(0, "issue", "--config", self.write_json({"cluster": {"ps": ["127.0.0.1:4000"]}}))
        ca, certificate, key = [(self.certs / name).read_bytes() for name in ("ca.pem", "ps-0.pem", "ps-0.key")]
        handler = grpc.method_handlers_generic_handler("test", {"Echo": grpc.unary_unary_rpc_method_handler(
            lambda request, context: request + context.auth_context()["x509_subject_alternative_name"][0])})
        server = grpc.server(concurrent.futures.ThreadPoolExecutor(1), handlers=[handler])
        self.addCleanup(lambda: server.stop(0).wait())
        credentials = grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)
        port = server.add_secure_port("localhost:0", credentials)
        server.start()
        client = [(self.certs / name).read_bytes() for name in ("client.key", "client.pem")]
        for host in ("localhost", "127.0.0.1"):
            with grpc.secure_channel(f"{host}:{port}", grpc.ssl_channel_credentials(ca, *client)) as channel:
                self.assertEqual(channel.unary_unary("/test/Echo")(b"I am ", timeout=PATIENCE, wait_for_ready=True),
                                 b"I am spiffe://example.org/client/client")


class Refusals(Cert):
    def test_the_command_line(self):
        self.assert_error(2, "init, issue, show or revoke\\?", "cert")
        self.assert_error(2, "isue: no such action; did you mean issue", "cert", "isue")
        self.assert_error(2, "for which tasks\\? --config FILE or --name NAME", "cert", "issue")
        self.assert_error(2, "which file\\?", "cert", "show")
        self.assert_error(2, "which files\\?", "cert", "revoke")
        self.assert_error(2, "unexpected argument x", "cert", "init", "x")

    def test_two_names_of_one_file(self):
        for other in ("a-b", "a/b"):
            names = ["--name", "spiffe://example.org/a/b", "--name", f"spiffe://example.org/{other}"]
            for more in ([], ["--force"]):
                self.refuse(1, f"example.org/a/b and spiffe://example.org/{other} would both be a-b.pem; issue one of",
                            "issue", *names, *more)
        self.assertEqual(self.names(), ["ca.crl", "ca.key", "ca.pem"])

    def test_interrupted(self):
        config = self.write_json({"cluster": {"ps": [f"127.0.0.1:{port}" for port in range(1000, 5000)]}})
        issuing = self.spawn("cert", "issue", "--config", config, "-o", self.certs)
        issuing.await_line("ps-3.pem")
        self.assertEqual(issuing.stop(signal.SIGTERM), -signal.SIGTERM)
        count = len(issuing.lines) - 1
        self.assertEqual(issuing.lines[-1], f"tensorlane cert: interrupted; {count} of 4001 were issued")
        self.assertEqual(self.names(), sorted(["ca.crl", "ca.key", "ca.pem"] + [
            f"ps-{i}.{kind}" for i in range(count) for kind in ("key", "pem")]))

    def test_no_authority(self):
        nowhere = self.folder / "nowhere"
        for arguments in (["issue", "--name", "ps:0"], ["revoke", self.certs / "ca.pem"]):
            self.assert_error(1, f"there is no authority in {nowhere}, tensorlane cert init -o {nowhere} makes one",
                              "cert", *arguments, "-o", nowhere)
        self.assertFalse(nowhere.exists())

    def test_the_key_of_the_authority_is_open_to_others(self):
        (self.certs / "ca.key").chmod(0o644)
        self.refuse(1, r"ca.key is open to other users \(mode 0644\): chmod 600", "issue", "--name", "ps:0")
        self.assertEqual(self.names(), ["ca.crl", "ca.key", "ca.pem"])

    def test_files_that_are_there_stay(self):
        path = self.write_json({"cluster": {"ps": ["127.0.0.1:4000"], "worker": ["127.0.0.1:4001"]}})
        self.refuse(1, "ca.key is there already; --force replaces it", "init")
        self.cert(0, "issue", "--name", "worker:0")
        before = self.show("worker-0.pem")["fingerprint"]
        self.refuse(1, "worker-0.key is there already; --force replaces it", "issue", "--config", path)
        self.assertNotIn("ps-0.pem", self.names())
        self.assertEqual(self.show("worker-0.pem")["fingerprint"], before)
        self.cert(0, "issue", "--config", path, "--force")
        self.assertNotEqual(self.show("worker-0.pem")["fingerprint"], before)
        self.cert(0, "init", "--force")
        self.assertNotEqual(openssl("verify", "-CAfile", self.certs / "ca.pem", self.certs / "ps-0.pem").returncode, 0)

    def test_a_folder_that_cannot_be_written(self):
        self.assert_error(1, "cannot make the folder .*/no/where: No such file or directory", "cert", "init", "-o",
                          self.folder / "no/where")
        file = self.write_json({}, "file")
        self.assert_error(1, "cannot write .*/file/ca.key|cannot .*Not a directory", "cert", "init", "-o", file)
        if os.geteuid() == 0:
            return
        self.certs.chmod(0o500)
        self.refuse(1, "cannot write .*ps-0.key: Permission denied", "issue", "--name", "ps:0")

    def test_names_that_are_none(self):
        for name, reason in (("ps:x", "is no name; write a task as ps:0"), ("ps:01", "without leading zeros"),
                             ("ps:4294967296", "is no number of 0 to 4294967295"), ("", "is no name; write"),
                             ("a b", "its path has a character"), ("a/b", "is no name; write"),
                             ("..", "has the part . or .."), ("ps-0", "choose another name"), ("ca", "choose another"),
                             ("spiffe://example.org/job/ps", "its path is not /job/JOB/task/INDEX"),
                             ("spiffe://example.org/ca", "choose another name"), ("x" * 255, "has 2.. bytes")):
            self.refuse(1, reason, "issue", "--name", name)
        self.refuse(1, "\"host:1\" is no host; write a DNS name", "issue", "--name", "ps:0", "--host", "host:1")
        for days in (0, 3651):
            self.refuse(2, f"--days {days}: .* 1 to 3650", "issue", "--name", "ps:0", "--days", days)
        self.refuse(1, "is no trust domain; use lower-case letters", "init", "--trust-domain", "Example.org", "--force")
        self.assertEqual(self.names(), ["ca.crl", "ca.key", "ca.pem"])

    def test_a_configuration_that_is_wrong(self):
        self.refuse(1, "cannot open .*/none.json|none.json", "issue", "--config", self.folder / "none.json")


class Revoking(Cert):
    def verify(self, name):
        return openssl("verify", "-crl_check", "-CAfile", self.certs / "ca.pem", "-CRLfile", self.certs / "ca.crl",
                       self.certs / name)

    def test_revoke(self):
        self.cert(0, "issue", "--name", "ps:0", "--name", "ps:1", "--name", "ann")
        self.assertEqual(self.verify("ps-0.pem").returncode, 0)
        self.assertIn("2 certificates revoked",
                      self.cert(0, "revoke", self.certs / "ps-0.pem", self.certs / "ann.pem").stdout)
        self.assertIn("0 certificates", self.cert(0, "revoke", self.certs / "ann.pem").stdout)
        for name in ("ps-0.pem", "ann.pem"):
            self.assertIn("certificate revoked", self.verify(name).stderr)
        self.assertEqual(self.verify("ps-1.pem").returncode, 0)
        # The one that takes its place has another number.
        self.cert(0, "issue", "--name", "ps:0", "--force")
        self.assertEqual(self.verify("ps-0.pem").returncode, 0)

    def test_what_cannot_be_revoked(self):
        self.assert_run(0, "cert", "init", "-o", self.folder / "b")
        self.assert_run(0, "cert", "issue", "-o", self.folder / "b", "--name", "ps:0")
        before = (self.certs / "ca.crl").read_bytes()
        self.refuse(1, "was not issued by the authority in", "revoke", self.folder / "b/ps-0.pem")
        self.refuse(1, "was not issued by the authority in", "revoke", self.certs / "ca.pem")
        self.refuse(1, "cannot open .*x.pem: No such file", "revoke", self.certs / "x.pem")
        self.assertEqual((self.certs / "ca.crl").read_bytes(), before)


class Showing(Cert):
    def request(self, name, *options, key=("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")):
        """Makes a certificate with OpenSSL's command, which is signed by itself."""
        result = openssl("req", "-x509", *key, "-nodes", "-keyout", self.certs / f"{name}.key", "-out",
                         self.certs / f"{name}.pem", "-subj", f"/CN={name}", "-days", 90, *options)
        self.assertEqual(result.returncode, 0, result.stderr)

    def sign_for(self, name, begin, end):
        """Signs the certificate anew, for another time."""
        (self.folder / "index.txt").touch()
        config = self.folder / "ca.cnf"
        config.write_text(f"[ca]\ndefault_ca=d\n[d]\ndatabase={self.folder}/index.txt\nnew_certs_dir={self.folder}\n"
                          "policy=p\ndefault_md=sha256\nrand_serial=yes\nunique_subject=no\nx509_extensions=e\n"
                          "[p]\ncommonName=supplied\n[e]\nsubjectAltName=URI:spiffe://a/client/b\n")
        certificate, key, request = (self.certs / f"{name}.{ending}" for ending in ("pem", "key", "csr"))
        for command in (["x509", "-x509toreq", "-in", certificate, "-signkey", key, "-out", request],
                        ["ca", "-batch", "-notext", "-selfsign", "-config", config, "-keyfile", key, "-in", request,
                         "-startdate", begin, "-enddate", end, "-out", certificate]):
            result = openssl(*command)
            self.assertEqual(result.returncode, 0, result.stderr)

    def warnings(self, name):
        result = self.assert_run(0, "cert", "show", self.certs / name)
        for line in result.stderr.splitlines():
            self.assertTrue(line.startswith(f"tensorlane cert: warning: {self.certs / name}: "), line)
        return result.stderr

    def test_show(self):
        self.cert(0, "issue", "--name", "ps:0", "--host", "ps-0.example.org")
        text = self.assert_run(0, "cert", "show", self.certs / "ps-0.pem").stdout
        for part in ("/job:ps/task:0 (member)", "DNS:ps-0.example.org",
                     "issuer       CN=tensorlane development authority", "EC prime256v1", "90 days left"):
            self.assertIn(part, text)
        fingerprint = openssl("x509", "-in", self.certs / "ps-0.pem", "-noout", "-fingerprint", "-sha256").stdout
        self.assertEqual(self.show("ps-0.pem")["fingerprint"], fingerprint.strip().split("=")[1])
        self.assertTrue(self.show("ps-0.pem")["usable"])
        self.assertEqual(self.warnings("ps-0.pem"), "")
        self.assertIn("none: an authority", self.assert_run(0, "cert", "show", self.certs / "ca.pem").stdout)
        self.assertEqual(self.show("ca.pem")["kind"], "authority")

    def test_what_is_worth_a_warning(self):
        self.cert(0, "issue", "--name", "ps:0", "--days", 10)
        self.assertIn("it expires in 10 days; issue another one", self.warnings("ps-0.pem"))
        (self.certs / "ps-0.key").chmod(0o604)
        self.assertIn("ps-0.key is open to other users (mode 0604): chmod 600", self.warnings("ps-0.pem"))
        self.cert(0, "issue", "--name", "ann")
        os.replace(self.certs / "ann.key", self.certs / "ps-0.key")
        self.assertIn("does not belong to the certificate", self.warnings("ps-0.pem"))

    def test_certificates_that_cannot_be_used(self):
        leaf = ("-addext", "basicConstraints=critical,CA:FALSE", "-addext")
        self.request("none", *leaf, "keyUsage=digitalSignature")
        self.assertIn("no name in its subjectAltName; issue one with the URI spiffe://", self.warnings("none.pem"))
        self.request("two", *leaf, "subjectAltName=URI:spiffe://a/client/b,URI:spiffe://a/client/c")
        self.assertIn("has more than one URI", self.warnings("two.pem"))
        for name, year in (("expired", 2001), ("early", 2101)):
            self.request(name)
            self.sign_for(name, f"{year}0101000000Z", f"{year}0201000000Z")
        self.assertIn("it has expired; issue another one", self.warnings("expired.pem"))
        self.assertLess(self.show("expired.pem")["days_left"], -9000)
        self.assertIn("it is not valid before 2101-01-01T00:00:00Z; look at the clock", self.warnings("early.pem"))
        self.request("weak", *leaf, "subjectAltName=URI:spiffe://a/client/b", key=("-newkey", "rsa:1024"))
        self.assertIn("its key (RSA 1024) is too weak", self.warnings("weak.pem"))
        for name in ("none", "two", "expired", "early", "weak"):
            self.assertFalse(self.show(f"{name}.pem")["usable"], name)

    def test_names_by_dns(self):
        leaf = ("-addext", "basicConstraints=critical,CA:FALSE", "-addext")
        self.request("pod", *leaf, "subjectAltName=DNS:localhost,DNS:ps-2.ps.default.svc.cluster.local")
        self.assertEqual(self.show("pod.pem")["name"], "/job:ps/task:2")
        self.request("ann", *leaf, "subjectAltName=DNS:ann.example.org")
        self.assertEqual(self.show("ann.pem")["name"], "ann.example.org")

    def test_hostile_names_do_not_reach_the_terminal(self):
        leaf = ("-addext", "basicConstraints=critical,CA:FALSE", "-addext")
        self.request("red", *leaf, "subjectAltName=URI:spiffe://a/\x1b[31mred")
        code, output = run_in_terminal("cert", "show", self.certs / "red.pem", env=environment(NO_COLOR=1))
        self.assertEqual(code, 0)
        self.assertNotIn("\x1b[31m", output)
        self.assertIn("its path has a character", output)

    def test_files_that_are_no_certificates(self):
        self.assert_error(1, "ca.key has no certificate in PEM", "cert", "show", self.certs / "ca.key")
        self.assert_error(1, "cannot open .*: No such file", "cert", "show", self.certs / "x.pem")
        self.assert_error(1, "is no file in PEM of at most 1 MiB", "cert", "show", self.certs)


if __name__ == "__main__":
    cli_support.main()
