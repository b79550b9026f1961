// SPDX-License-Identifier: Apache-2.0
/* Whether AddressSanitizer watches this program: gcc and clang say so in different ways. */
#ifndef BASE_SANITIZER_H
#define BASE_SANITIZER_H

#ifdef __has_feature
#if __has_feature(address_sanitizer)
#define TL_HAS_ADDRESS_SANITIZER 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) && !defined(TL_HAS_ADDRESS_SANITIZER)
#define TL_HAS_ADDRESS_SANITIZER 1
#endif

#endif
