//! A plan from a file or a peer: parse, check, print, parse again.
#![no_main]

use distgpipe_core::schedule::{check, Plan};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    match text.parse::<Plan>() {
        Ok(plan) => {
            if let Err(error) = check(&plan) {
                // The message contains an excerpt of the plan, which is code of its own.
                let _ = error.to_string();
            }
            let again = plan.to_string().parse::<Plan>();
            assert_eq!(again.as_ref(), Ok(&plan), "what is printed parses to the same plan");
        }
        Err(error) => {
            let _ = error.to_string();
        }
    }
});
