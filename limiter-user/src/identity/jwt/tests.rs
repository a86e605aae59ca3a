use std::{fs, os::unix::fs::PermissionsExt, path::Path, time::Duration};

use jsonwebtoken::{Algorithm, EncodingKey, Header, encode, jwk::Jwk};
use serde_json::json;

use super::*;
use crate::config::{Config, Environment};

const RSA: &str = include_str!("test_keys/rsa.pem");
const EC: &str = include_str!("test_keys/ec.pem");
const ED: &str = include_str!("test_keys/ed.pem");
const RSA_PUBLIC: &str = include_str!("test_keys/rsa.pub");
const EC_PUBLIC: &str = include_str!("test_keys/ec.pub");
const ED_PUBLIC: &str = include_str!("test_keys/ed.pub");
const P384_PUBLIC: &str = include_str!("test_keys/ec384.pub");
const SECRET: &str = "0123456789abcdef0123456789abcdef";
const NOW_S: i64 = 1_800_000_000;

fn at(seconds: i64) -> UnixMicros {
    UnixMicros::new(u64::try_from(seconds).unwrap() * 1_000_000)
}

fn signer(algorithm: Algorithm) -> EncodingKey {
    match format!("{algorithm:?}").as_str() {
        "HS256" => EncodingKey::from_secret(SECRET.as_bytes()).unwrap(),
        "RS256" => EncodingKey::from_rsa_pem(RSA.as_bytes()).unwrap(),
        "ES256" => EncodingKey::from_ec_pem(EC.as_bytes()).unwrap(),
        "EdDSA" => EncodingKey::from_ed_pem(ED.as_bytes()).unwrap(),
        other => panic!("{other} is not signed with here"),
    }
}

fn sign(algorithm: Algorithm, id: Option<&str>, claims: &Value) -> String {
    let header = Header { kid: id.map(str::to_owned), ..Header::new(algorithm) };
    encode(&header, claims, &signer(algorithm)).unwrap()
}

fn jwk(algorithm: Algorithm, id: &str) -> Value {
    let mut jwk = Jwk::from_encoding_key(&signer(algorithm), algorithm).unwrap();
    jwk.common.key_id = Some(id.into());
    serde_json::to_value(jwk).unwrap()
}

/// Files of keys, and the configuration that names them.
struct Files(tempfile::TempDir);

impl Files {
    fn new(files: &[(&str, &str)]) -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        files.iter().for_each(|(name, text)| folder.write(name, text));
        folder
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.0.path().join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    }

    fn config(&self, fields: &str) -> JwtConfig {
        let text = format!("[identity.jwt]\n{fields}\n");
        let path = self.0.path().join("limiter.toml");
        Config::parse(Path::new(&path), &text, Environment::default()).unwrap().identity.jwt.unwrap()
    }

    fn load(&self, fields: &str) -> Result<Jwt, String> {
        let shorten = |text: String| text.replace(&format!("{}/", self.0.path().display()), "");
        Jwt::load(&self.config(fields)).map_err(|errors| shorten(errors.to_string()))
    }
}

fn user(verified: Option<Verified>) -> Option<String> {
    verified.map(|verified| verified.user.to_string())
}

#[test]
fn each_algorithm_is_verified_with_keys_of_each_form() {
    let all = [Algorithm::HS256, Algorithm::RS256, Algorithm::ES256, Algorithm::EdDSA];
    let set = json!({ "keys": all.map(|algorithm| jwk(algorithm, &format!("{algorithm:?}"))) }).to_string();
    let files = Files::new(&[
        ("public.pem", &format!("# Ours.\n{RSA_PUBLIC}\n{EC_PUBLIC}{ED_PUBLIC}")),
        ("secret", &format!("{SECRET}\n")),
        ("set.json", &set),
    ]);
    for fields in ["public_key_file = \"public.pem\"\nsecret_file = \"secret\"", "jwks_file = \"set.json\""] {
        let jwt = files.load(fields).unwrap();
        assert_eq!(jwt.key_count(), 4);
        for algorithm in all {
            let token = sign(algorithm, None, &json!({ "sub": "u_1", "exp": NOW_S + 60 }));
            assert_eq!(user(jwt.verify(&token, at(NOW_S))).as_deref(), Some("u_1"), "{algorithm:?} {fields}");
            // Again, from the cache; and not any more once it is over, with the leeway.
            assert_eq!(user(jwt.verify(&token, at(NOW_S + 89))).as_deref(), Some("u_1"));
            assert_eq!(jwt.verify(&token, at(NOW_S + 90)), None, "{algorithm:?}");
            assert_eq!(files.load(fields).unwrap().verify(&token, at(NOW_S + 90)), None, "{algorithm:?}");
            // Of another's key, or changed on the way.
            let (head, _) = token.rsplit_once('.').unwrap();
            let other = sign(algorithm, None, &json!({ "sub": "u_2", "exp": NOW_S + 60 }));
            let (_, signature) = other.rsplit_once('.').unwrap();
            assert_eq!(jwt.verify(&format!("{head}.{signature}"), at(NOW_S)), None, "{algorithm:?}");
        }
    }
    // A key id chooses: another's is not tried, and an unknown one has no key.
    let jwt = files.load("jwks_file = \"set.json\"").unwrap();
    for (id, refused) in [("ES256", None), ("RS256", Some(Refusal::Signature)), ("x", Some(Refusal::UnknownKey))] {
        let token = sign(Algorithm::ES256, Some(id), &json!({ "sub": "u_1", "exp": NOW_S + 60 }));
        assert_eq!(jwt.check(&token, at(NOW_S)).err(), refused, "{id}");
        assert_eq!(jwt.verify(&token, at(NOW_S)).is_some(), refused.is_none(), "{id}");
    }
    let counted: Vec<_> = jwt.refusals.counts().filter(|(_, count)| *count > 0).collect();
    assert_eq!(counted, [(["token", "unknown_key"], 1), (["token", "signature"], 1)]);
}

#[test]
fn the_key_says_the_algorithm_and_never_the_token() {
    use jsonwebtoken::jws;
    let files = Files::new(&[("rsa.pem", RSA_PUBLIC), ("all.pem", &format!("{RSA_PUBLIC}{EC_PUBLIC}"))]);
    let jwt = files.load("public_key_file = \"rsa.pem\"").unwrap();
    let claims = json!({ "sub": "u_1", "exp": NOW_S + 60 });
    let good = sign(Algorithm::RS256, None, &claims);
    assert!(jwt.verify(&good, at(NOW_S)).is_some());
    let payload = good.split('.').nth(1).unwrap();
    // {"alg":"none"}, in two spellings, without and with the signature of another token.
    let none = "eyJhbGciOiJub25lIn0";
    let none_too = "eyJhbGciOiJOT05FIn0";
    let signature = good.rsplit('.').next().unwrap();
    // With the public key, which everybody has, as the secret.
    let confused =
        encode(&Header::new(Algorithm::HS256), &claims, &EncodingKey::from_secret(RSA_PUBLIC.as_bytes()).unwrap());
    let critical = Header { crit: Some(vec!["exp".into()]), ..Header::new(Algorithm::RS256) };
    let critical = encode(&critical, &claims, &signer(Algorithm::RS256)).unwrap();
    let flattened = jws::encode(&Header::new(Algorithm::RS256), Some(&claims), &signer(Algorithm::RS256)).unwrap();
    let flattened = serde_json::to_string(&flattened).unwrap();
    for token in [
        format!("{none}.{payload}."),
        format!("{none_too}.{payload}."),
        format!("{none}.{payload}.{signature}"),
        confused.unwrap(),
        critical,
        flattened,
        sign(Algorithm::ES256, None, &claims),
        format!("{good}."),
        format!("{good}x"),
        good.replace('.', " "),
        "..".into(),
        "a.b.c".into(),
        "x".repeat(1 << 20),
        String::new(),
    ] {
        assert_eq!(jwt.verify(&token, at(NOW_S)), None, "{token}");
    }
    // Keys of algorithms that are not allowed are not used.
    let jwt = files.load("public_key_file = \"all.pem\"\nalgorithms = [\"RS256\"]").unwrap();
    assert!(jwt.verify(&good, at(NOW_S)).is_some());
    assert_eq!(jwt.verify(&sign(Algorithm::ES256, None, &claims), at(NOW_S)), None);
}

#[test]
fn claims() {
    let files = Files::new(&[("secret", SECRET)]);
    let jwt = files
        .load("secret_file = \"secret\"\naudience = [\"api\", \"web\"]\nissuer = \"us\"\nleeway = \"10s\"\nplan_claim = \"tier\"")
        .unwrap();
    assert_eq!(jwt.config.leeway, Duration::from_secs(10));
    let good = json!({ "sub": "u_1", "exp": NOW_S, "nbf": NOW_S, "aud": "api", "iss": "us", "tier": "pro" });
    let long = "x".repeat(257);
    for (change, expected) in [
        (json!({}), Ok("u_1 pro")),
        (json!({ "exp": NOW_S - 9 }), Ok("u_1 pro")),
        (json!({ "exp": NOW_S - 10 }), Err("expired")),
        (json!({ "exp": 1_800_000_000.5 }), Ok("u_1 pro")),
        (json!({ "exp": 1e300 }), Err("claims")),
        (json!({ "exp": i64::MAX }), Ok("u_1 pro")),
        (json!({ "exp": u64::MAX }), Err("claims")),
        (json!({ "exp": -1 }), Err("expired")),
        (json!({ "exp": "1900000000" }), Err("claims")),
        (json!({ "exp": null }), Err("claims")),
        (json!({ "nbf": NOW_S + 10 }), Ok("u_1 pro")),
        (json!({ "nbf": NOW_S + 11 }), Err("not_yet_valid")),
        (json!({ "nbf": "soon" }), Err("claims")),
        (json!({ "aud": ["other", "web"] }), Ok("u_1 pro")),
        (json!({ "aud": ["other"] }), Err("audience")),
        (json!({ "aud": "apis" }), Err("audience")),
        (json!({ "aud": [] }), Err("audience")),
        (json!({ "aud": null }), Err("audience")),
        (json!({ "iss": "them" }), Err("issuer")),
        (json!({ "iss": ["us"] }), Err("issuer")),
        (json!({ "iss": null }), Err("issuer")),
        (json!({ "sub": "" }), Err("claims")),
        (json!({ "sub": 7 }), Err("claims")),
        (json!({ "sub": null }), Err("claims")),
        (json!({ "sub": long }), Err("claims")),
        (json!({ "sub": "жук:{}" }), Ok("жук:{} pro")),
        (json!({ "tier": null }), Ok("u_1 -")),
        (json!({ "tier": 3 }), Err("claims")),
        (json!({ "tier": long }), Err("claims")),
    ] {
        let mut claims = good.clone();
        for (name, value) in change.as_object().unwrap() {
            claims[name] = value.clone();
        }
        let verified = jwt.check(&sign(Algorithm::HS256, None, &claims), at(NOW_S));
        let found = verified.map(|Verified { user, plan }| format!("{user} {}", plan.as_deref().unwrap_or("-")));
        assert_eq!(found.as_deref().map_err(|refusal| refusal.labels()[1]), expected, "{change}");
    }
    for missing in ["sub", "exp", "aud", "iss"] {
        let mut claims = good.clone();
        claims.as_object_mut().unwrap().remove(missing);
        assert_eq!(jwt.verify(&sign(Algorithm::HS256, None, &claims), at(NOW_S)), None, "{missing}");
    }
    // Without an audience and an issuer in the configuration, any will do.
    let jwt = files.load("secret_file = \"secret\"").unwrap();
    let verified = jwt.verify(&sign(Algorithm::HS256, None, &good), at(NOW_S)).unwrap();
    assert_eq!(verified, Verified { user: "u_1".into(), plan: None });
}

#[test]
fn files_that_hold_no_key_are_refused() {
    let oct = |secret: &str| json!({ "keys": [{ "kty": "oct", "k": secret }] }).to_string();
    let of_encryption = {
        let mut jwk = jwk(Algorithm::RS256, "a");
        jwk["use"] = "enc".into();
        json!({ "keys": [jwk] }).to_string()
    };
    let many = json!({ "keys": vec![jwk(Algorithm::EdDSA, "a"); 17] }).to_string();
    let one_key = "has no key for signatures of HS256, RS256, ES256 or EdDSA";
    for (field, text, message) in [
        ("public_key_file", RSA, "is a private key: the agent needs the public one alone (openssl pkey -pubout)"),
        ("public_key_file", P384_PUBLIC, "is not PEM with public keys of RSA, P-256 or Ed25519 (BEGIN PUBLIC KEY)"),
        ("public_key_file", "", "is not PEM with public keys of RSA, P-256 or Ed25519 (BEGIN PUBLIC KEY)"),
        ("secret_file", RSA_PUBLIC, "is a key in PEM, and no secret: name it in public_key_file"),
        ("secret_file", "hunter2", "has 7 bytes: a secret of HS256 has at least 32"),
        ("jwks_file", "{\"keys\": []}", one_key),
        ("jwks_file", &oct("c2hvcnQ"), one_key),
        ("jwks_file", &of_encryption, one_key),
        ("jwks_file", &many, "17 keys of tokens in all: at most 16 are tried"),
    ] {
        let error = Files::new(&[("f", text)]).load(&format!("{field} = \"f\"")).unwrap_err();
        assert_eq!(error, format!("f: identity.jwt.{field}: {message}"));
    }
    let not_json = Files::new(&[("f", "[]")]).load("jwks_file = \"f\"").unwrap_err();
    assert!(not_json.starts_with("f: identity.jwt.jwks_file: is not a JWK set: "), "{not_json}");
    let missing = Files::new(&[]).load("jwks_file = \"f\"").unwrap_err();
    assert!(missing.contains("cannot read the keys of tokens: no such file"), "{missing}");
    let not_allowed = Files::new(&[("f", RSA_PUBLIC)]).load("public_key_file = \"f\"\nalgorithms = [\"ES256\"]");
    assert!(not_allowed.unwrap_err().contains("has no key that identity.jwt.algorithms allows (it has one of RS256)"));
    let open = Files::new(&[("f", SECRET)]);
    fs::set_permissions(open.0.path().join("f"), fs::Permissions::from_mode(0o644)).unwrap();
    assert!(open.load("secret_file = \"f\"").unwrap_err().contains("everybody may use it (mode 0644): run chmod 600"));
}

#[test]
fn changed_keys_are_read_once_they_hold_still_and_bad_ones_change_nothing() {
    let files = Files::new(&[("f", SECRET)]);
    let mut watch = JwtWatch::new(files.config("secret_file = \"f\""));
    let mut looks = |change: &dyn Fn()| {
        change();
        [(); 3].map(|()| match watch.changed() {
            Ok(keys) => keys.map_or("", |_| "read").to_owned(),
            Err(errors) => errors.to_string().rsplit(": ").next().unwrap().to_owned(),
        })
    };
    assert_eq!(looks(&|| ()), ["", "", ""]);
    assert_eq!(looks(&|| files.write("f", &SECRET.repeat(2))), ["", "read", ""]);
    assert_eq!(looks(&|| files.write("f", "")), ["", "a secret of HS256 has at least 32", ""]);
    assert_eq!(looks(&|| fs::remove_file(files.0.path().join("f")).unwrap()), ["no such file", "", ""]);
    assert_eq!(looks(&|| files.write("f", SECRET)), ["read", "", ""]);
}
